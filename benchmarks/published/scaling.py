"""Published rates of several GPUs, predicted by the planner, beside a straight line through fewer of them.

    python -m benchmarks.published.scaling [--fit] [--out benchmarks/results]

The machine files hold the rates. Compute is fitted to a row of one GPU (`benchmarks.published.predict`). Of
the machines here two have a fitted row of their own: the one of which only several GPUs were published, for
its matrix products, and four GPUs without access to each other, for what NCCL's collectives reach through
host memory. `--fit` prints these two. The line takes the same system's row of the same model on the fewest
GPUs, times their number; without one, the FLOPs of the machine's fitted row.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.published.predict import (
    MEDIAN,
    WORST,
    Compared,
    by_flops,
    errors_of,
    fitted_rate,
    machine_rows,
    planned,
    read_options,
)
from benchmarks.published.rows import Row, machine_named, rows, scaling_rows, step_of
from benchmarks.report import hardware
from megatrain.hardware import HardwareSpec

STRAIGHT = 0.05
"""A row is on a straight line if that is wrong by no more."""

OFF = "off the line"

ALONE = "by FLOPs"
"""A row without one on fewer GPUs: FLOPs alone stand beside it, which is a weaker rival than a line."""

_ONE_GPU = {
    "8xh100": "h100",
    "4xrtx-4090": "rtx-4090",
    "8xrtx-4090": "rtx-4090",
    "8xrtx-pro-6000": "rtx-pro-6000",
}
"""By machine of several GPUs, the file of one of them, in whose rows its matrix products were fitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled(Compared):
    """And beside a straight line."""

    linear: float
    is_line: bool
    """There is a row of fewer GPUs to draw it through; False: it is FLOPs alone."""

    @property
    def linear_error(self) -> float:
        """As `error`, of the straight line."""
        return self.linear / self.row.tokens_per_s - 1

    @property
    def place(self) -> str:
        """Where the row is: on a straight line through fewer GPUs, off it, or where it begins."""
        if self.linear_error == 0:
            return "first"
        if not self.is_line:
            return ALONE
        return "on the line" if abs(self.linear_error) <= STRAIGHT else OFF


def scaled_rows(machines: Sequence[str] = ()) -> Iterator[Scaled]:
    """Yield the rows of some machines, or of all, with what is predicted; those left out are not there."""
    for row in scaling_rows():
        if not row.left_out and (not machines or row.machine in machines):
            yield scaled(row)


def scaled(row: Row) -> Scaled:
    """Return a row with what the planner says, and a straight line."""
    predicted, bound = planned(row)
    linear, is_line = _linear(row)
    return Scaled(row=row, predicted=predicted, bound=bound, linear=linear, is_line=is_line)


def _linear(row: Row) -> tuple[float, bool]:
    """Return the rate of the fewest GPUs times their number, or that by FLOPs; and whether it is a line."""
    one_gpu = _ONE_GPU.get(row.machine, "")

    def is_same(other: Row) -> bool:
        same = (other.system, other.model, other.seq_len, other.is_fused) == (
            row.system,
            row.model,
            row.seq_len,
            row.is_fused,
        )
        return same and not other.left_out and _count(other) < _count(row)

    found = [other for other in rows() if other.machine == one_gpu and is_same(other)]
    found += [other for other in scaling_rows() if other.machine == row.machine and is_same(other)]
    if found:
        base = min(found, key=_count)
        return base.tokens_per_s * _count(row) / _count(base), True
    if not one_gpu:  # the fewest GPUs themselves
        return row.tokens_per_s, True
    return by_flops(row, machine_rows()[one_gpu][0]), False


def _count(row: Row) -> int:
    return row.gpus * row.nodes


def fitted_collectives(row: Row, spec: HardwareSpec) -> float:
    """Return the rate of collectives at which the planner gives a row's figure."""
    low, high = 1e8, 1e12
    spec = replace(spec, peer_bytes_per_s=None)
    for _ in range(24):
        rate = (low * high) ** 0.5
        step = step_of(row, replace(spec, peer_bytes_per_s=rate))
        if row.tokens / step.step_s > row.tokens_per_s:
            high = rate
        else:
            low = rate
    return rate


def table(found: Sequence[Scaled]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    heads = "machine", "GPUs", "system", "model", "per step", "published", "planned", "error", "straight line"
    yield f"| {' | '.join(heads)} | |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for one in found:
        row = one.row
        name = row.system + (", not compiled" if row.is_fused is False else "")
        label = "fitted" if row.is_fitted else one.place
        rates = f"{row.tokens_per_s:,.0f} | {one.predicted:,.0f}"
        yield (
            f"| {row.machine} | {_count(row)} | {name} | {row.model} | {row.tokens:,} "
            f"| {rates} | {one.error:+.1%} | {one.linear_error:+.1%} | {label} |"
        )


def summary(found: Sequence[Scaled]) -> Iterator[str]:
    """Yield the errors of rows that are not fitted: those off a straight line, those without, and all."""
    yield "| rows | number | median error | worst | beyond 25 % | straight line: median | worst |"
    yield "|---|---|---|---|---|---|---|"
    free = [one for one in found if not one.row.is_fitted and one.place != "first"]
    for name in (OFF, ALONE, "all"):
        some = [one for one in free if name in (one.place, "all")]
        yield errors_of(name, [one.error for one in some], [one.linear_error for one in some])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it where `--out` says."""
    options = read_options(__doc__, arguments)
    if options.fit:
        for row in scaling_rows():
            if row.is_fitted:
                spec = machine_named(row.machine)
                is_compute = row.machine not in _ONE_GPU
                rate = fitted_rate(row, spec) if is_compute else fitted_collectives(row, spec)
                print(row.machine, "products" if is_compute else "collectives", f"{rate:.3g}", flush=True)
        return
    found = list(scaled_rows(options.machine))
    lines = [*summary(found), "", *table(found)]
    left = [row for row in scaling_rows() if row.left_out]
    lines += ["", f"Left out: {len(left)} rows.", ""]
    lines += [f"- {row.system}, {row.machine}, {row.model}: {row.left_out}" for row in left]
    print("\n".join(lines))
    free = [one for one in found if one.place == OFF and not one.row.is_fitted]
    result = {
        "benchmark": "published scaling",
        "aims": {"median": MEDIAN, "worst": WORST},
        "median": statistics.median(abs(one.error) for one in free),
        "worst": max(abs(one.error) for one in free),
        "linear_median": statistics.median(abs(one.linear_error) for one in free),
        "linear_worst": max(abs(one.linear_error) for one in free),
        "rows": [
            asdict(one.row)
            | {"predicted": one.predicted, "error": one.error, "linear_error": one.linear_error}
            | {"place": one.place, "bound": one.bound}
            for one in found
        ],
        "hardware": hardware(),
    }
    if options.out is not None:
        (options.out / "published-scaling.md").write_text("\n".join(lines) + "\n")
        (options.out / "published-scaling.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("benchmark", "median", "worst", "linear_median")}))


if __name__ == "__main__":
    main()
