"""Published rows of more than 131,072 tokens: predicted as the system ran them, and beside our own plan.

    python -m benchmarks.published.long [--out benchmarks/results]

Each row is predicted with its own settings, as `predict` does with shorter ones, and by FLOPs alone. Beside
it is what `megatrain plan` says of the same model, length and step on that machine file: the speed, if it
fits, with fp32 masters and moments, clipped; else the pool that does not fit. Rows of ours pass in the tiles
that `train.tile_tokens` cuts such rows into by default, as those of ml_dataflow pass in chunks. Nothing of
ours was measured. The rate of attention is the one that the row itself implies, all else as planned.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.plan.row_lengths import request
from benchmarks.published.predict import (
    Prediction,
    errors_of,
    machine_rows,
    prediction,
    read_options,
)
from benchmarks.published.rows import Row, anatomy_of, config_of, long_rows, machine_named, step_of
from benchmarks.report import hardware
from megatrain.config.policies import KEEP
from megatrain.hardware import load_machine
from megatrain.plan.search.planner import make_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """Our plan for a row's model, length and step."""

    fits: bool
    tokens_per_s: float | None
    """None if it does not fit."""
    bound: str | None
    problem: str
    """Why it does not fit; empty if it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Long:
    """A row with what the planner says of it, and with our own plan."""

    own: Prediction
    """The row as its system ran it."""
    attention_flops_per_s: float
    """The rate of its attention with which the planner would give its figure: see `attention_rate`."""
    ours: Ours

    @property
    def ratio(self) -> float | None:
        """Ours, planned, over the row's, measured; None if ours does not fit."""
        return None if self.ours.tokens_per_s is None else self.ours.tokens_per_s / self.own.row.tokens_per_s


def long(row: Row) -> Long:
    """Return a long row with what the planner says of it."""
    own = prediction(row, machine_rows()[row.machine][0])
    return Long(own=own, attention_flops_per_s=attention_rate(row), ours=ours(row))


def ours(row: Row) -> Ours:
    """Return what `megatrain plan` says of a row's model, length and step, with the drives of the machine."""
    assert row.tokens == row.seq_len, "a step is one row"
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder) / "config.json"
        shape.write_text(config_of(row).to_json_string(use_diff=False))
        plan = make_plan(request(shape, load_machine(row.machine), row.seq_len))
    return Ours(
        fits=plan.fits,
        tokens_per_s=plan.tokens_per_s if plan.fits else None,
        bound=plan.bound if plan.fits else None,
        problem=plan.problem,
    )


def attention_rate(row: Row) -> float:
    """Return the FLOP/s of attention, forward and backward together, with which a row comes out as published.

    All but attention takes what the planner says. Layers that run again compute their attention once more.
    """
    step = step_of(row, machine_named(row.machine))
    flops = seconds = 0.0
    for layer, policy in zip(anatomy_of(row).layers, step.choice.activations, strict=True):
        runs = 1 if policy == KEEP.name else 2
        flops += runs * layer.forward.attention_flops + layer.backward.attention_flops
        seconds += runs * step.rates.attention_s(layer.forward)
        seconds += step.rates.attention_backward_s(layer.backward)
    beside_s = step.step_s - seconds
    return flops / (row.tokens / row.tokens_per_s - beside_s)


def table(found: Sequence[Long]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    heads = "machine", "system", "model", "tokens of a row", "published", "planned", "error", "FLOPs alone"
    yield f"| {' | '.join(heads)} | attention, TFLOP/s | ours | ratio |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for one in found:
        own, row = one.own, one.own.row
        model = row.model + (f", {row.layers} layers" if row.layers else "")
        planned = "does not fit | "
        if one.ours.tokens_per_s is not None:
            planned = f"{one.ours.tokens_per_s:,.0f} | {one.ratio:.2f}"
        yield (
            f"| {row.machine} | {row.system} | {model} | {row.seq_len:,} | {row.tokens_per_s:,.1f} "
            f"| {own.predicted:,.1f} | {own.error:+.1%} | {own.flops_error:+.1%} "
            f"| {one.attention_flops_per_s / 1e12:.0f} | {planned} |"
        )


def summary(found: Sequence[Long]) -> Iterator[str]:
    """Yield the errors of each machine and of all."""
    yield "| machine | rows | median error | worst | beyond 25 % | FLOPs alone: median | worst |"
    yield "|---|---|---|---|---|---|---|"
    for name in (*dict.fromkeys(one.own.row.machine for one in found), "all"):
        some = [one.own for one in found if name in (one.own.row.machine, "all")]
        yield errors_of(name, [one.error for one in some], [one.flops_error for one in some])


def report(found: Sequence[Long]) -> Iterator[str]:
    """Yield the lines of the page: errors, rows, why ours do not fit, and where each row is from."""
    yield from (*summary(found), "", *table(found))
    missing = [one for one in found if not one.ours.fits]
    if missing:
        yield from ("", "Why ours do not fit:", "")
    for one in missing:
        yield f"- {_name(one.own.row)}: {one.ours.problem}"
    yield from ("", "Sources:", "")
    for one in found:
        yield f"- {_name(one.own.row)}: {one.own.row.source}"


def _name(row: Row) -> str:
    layers = f", {row.layers} layers" if row.layers else ""
    return f"{row.system}, {row.machine}, {row.model}{layers}, {row.seq_len:,} tokens"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, and write it where `--out` says."""
    options = read_options(__doc__, arguments)
    found = [long(row) for row in long_rows() if not options.machine or row.machine in options.machine]
    lines = list(report(found))
    print("\n".join(lines))
    errors = [abs(one.own.error) for one in found]
    result = {
        "benchmark": "published rows of more than 131,072 tokens",
        "median": statistics.median(errors),
        "worst": max(errors),
        "rows": [
            asdict(one.own.row)
            | {"predicted": one.own.predicted, "error": one.own.error, "flops_error": one.own.flops_error}
            | {"attention_flops_per_s": one.attention_flops_per_s}
            | {"ours": asdict(one.ours), "ratio": one.ratio}
            for one in found
        ],
        "hardware": hardware(),
    }
    if options.out is not None:
        (options.out / "published-long.md").write_text("\n".join(lines) + "\n")
        (options.out / "published-long.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps({"benchmark": result["benchmark"], "median": result["median"], "worst": result["worst"]})
    )


if __name__ == "__main__":
    main()
