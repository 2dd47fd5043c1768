"""Every published row, predicted by the planner, with its error and that of a fit of FLOPs alone.

    python -m benchmarks.published.predict [--fit] [--out benchmarks/results]

The machine files hold the rates, one set per machine. `--fit` prints the rate of matrix products at which the
planner gives each machine's fitted row, for the machine file; without it nothing is fitted. A prediction by
FLOPs alone takes one rate from the same row: where it does as well, the planner has shown nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.published.rows import Row, flops_of, machine_named, rows, step_of
from benchmarks.report import hardware
from megatrain.hardware import HardwareSpec, load_machine

MEDIAN, WORST = 0.12, 0.25
"""Errors that are aimed at."""
_AS_WELL = 0.02
"""A prediction by FLOPs alone does as well if its error is no larger than the planner's by more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A row beside what the planner says."""

    row: Row
    predicted: float
    bound: str

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.row.tokens_per_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction(Compared):
    """And beside FLOPs alone."""

    by_flops: float

    @property
    def flops_error(self) -> float:
        """As `error`, by FLOPs alone."""
        return self.by_flops / self.row.tokens_per_s - 1

    @property
    def label(self) -> str:
        """What the row is worth."""
        if self.row.is_fitted:
            return "fitted"
        return "FLOPs do as well" if abs(self.flops_error) <= abs(self.error) + _AS_WELL else "predicted"


def machine_rows() -> dict[str, list[Row]]:
    """Return the rows of every machine, the fitted one first; those left out are not there."""
    found: dict[str, list[Row]] = {}
    for row in rows():
        if not row.left_out:
            found.setdefault(row.machine, []).append(row)
    for listed in found.values():
        listed.sort(key=lambda row: not row.is_fitted)
        assert [row.is_fitted for row in listed].count(True) == 1, "one row per machine is fitted"
    return found


def predictions(machines: Sequence[str] = ()) -> Iterator[Prediction]:
    """Yield the rows of some machines, or of all, with what the planner says."""
    for machine, listed in machine_rows().items():
        if machines and machine not in machines:
            continue
        for row in listed:
            yield prediction(row, listed[0])


def prediction(row: Row, fitted: Row) -> Prediction:
    """Return a row with what the planner says, and what the fitted row of one of its GPUs says by FLOPs."""
    predicted, bound = planned(row)
    return Prediction(row=row, predicted=predicted, bound=bound, by_flops=by_flops(row, fitted))


def planned(row: Row) -> tuple[float, str]:
    """Return the tokens per second that the planner gives a row, and what bounds its step."""
    step = step_of(row, machine_named(row.machine))
    return row.tokens / step.step_s, max(step.bounds_s, key=lambda name: step.bounds_s[name])


def by_flops(row: Row, fitted: Row) -> float:
    """Return the tokens per second of a row by FLOPs alone, at the rate of one GPU's fitted row."""
    flops_per_s = flops_of(fitted) / (fitted.tokens / fitted.tokens_per_s)
    return row.tokens / (flops_of(row) / flops_per_s)


def fitted_rate(row: Row, spec: HardwareSpec) -> float:
    """Return the rate of matrix products in bf16 at which the planner gives a row's figure."""
    wanted_s = row.tokens / row.tokens_per_s
    for _ in range(20):
        rate = spec.matmul_flops_per_s["bf16"]
        missing_s = wanted_s - step_of(row, spec).step_s
        if abs(missing_s / wanted_s) < 1e-4:
            break
        products_s = flops_of(row) / rate
        rate *= products_s / max(0.1 * products_s, products_s + missing_s)
        spec = replace(spec, matmul_flops_per_s={**spec.matmul_flops_per_s, "bf16": rate})
    return spec.matmul_flops_per_s["bf16"]


def table(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    heads = "machine", "system", "model", "tokens of a row", "per step", "published", "planned", "error"
    yield f"| {' | '.join(heads)} | FLOPs alone | |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for one in found:
        row = one.row
        model = row.model + (f", {row.layers} layers" if row.layers else "")
        yield (
            f"| {row.machine} | {row.system} | {model} | {row.seq_len:,} | {row.tokens:,} "
            f"| {row.tokens_per_s:,.0f} | {one.predicted:,.0f} | {one.error:+.1%} | {one.flops_error:+.1%} "
            f"| {one.label} |"
        )


def summary(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the errors of each machine and of all, of rows that are not fitted."""
    yield "| machine | rows | median error | worst | beyond 25 % | FLOPs alone: median | worst |"
    yield "|---|---|---|---|---|---|---|"
    machines = dict.fromkeys(one.row.machine for one in found)
    for name in (*machines, "all"):
        some = [one for one in found if not one.row.is_fitted and name in (one.row.machine, "all")]
        yield errors_of(name, [one.error for one in some], [one.flops_error for one in some])


def errors_of(name: str, errors: Sequence[float], others: Sequence[float]) -> str:
    """Return a row of a table: the planner's errors, and those of what it is compared with."""
    own, other = [abs(error) for error in errors], [abs(error) for error in others]
    return (
        f"| {name} | {len(own)} | {statistics.median(own):.1%} | {max(own):.1%} "
        f"| {sum(error > WORST for error in own)} "
        f"| {statistics.median(other):.1%} | {max(other):.1%} |"
    )


def read_options(doc: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a benchmark of published rows."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--machine", action="append", default=[])
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it where `--out` says."""
    options = read_options(__doc__, arguments)
    if options.fit:
        for machine, listed in machine_rows().items():
            if not options.machine or machine in options.machine:
                print(machine, f"{fitted_rate(listed[0], load_machine(machine)):.3g}", flush=True)
        return
    found = list(predictions(options.machine))
    lines = [*summary(found), "", *table(found)]
    left = [row for row in rows() if row.left_out]
    lines += ["", f"Left out: {len(left)} rows.", ""]
    lines += [
        f"- {row.system}, {row.machine}, {row.model}, {row.seq_len:,} tokens: {row.left_out}" for row in left
    ]
    print("\n".join(lines))
    result = {
        "benchmark": "published",
        "rows": [
            asdict(one.row) | {"predicted": one.predicted, "error": one.error, "flops_error": one.flops_error}
            for one in found
        ],
        "hardware": hardware(),
    }
    if options.out is not None:
        (options.out / "published.md").write_text("\n".join(lines) + "\n")
        (options.out / "published.json").write_text(json.dumps(result, indent=1) + "\n")
    errors = [abs(one.error) for one in found if not one.row.is_fitted]
    print(json.dumps({"benchmark": "published", "median": statistics.median(errors), "worst": max(errors)}))


if __name__ == "__main__":
    main()
