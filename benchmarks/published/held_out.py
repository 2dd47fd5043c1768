"""Published rows that nothing was fitted to, predicted by the planner, beside FLOPs alone.

    python -m benchmarks.published.held_out [--out benchmarks/results]

A group is a system on a machine. No row of a group of `held_out.json` is in the other files of rows, no rate
of a machine was chosen with it, and the rows were committed before the cost model that they judge: where a
change of the model is made after a look at them, they are used up, and other groups have to be found. `--out`
therefore adds a line for every run to the saved file: when it was, at which commit, and what came out.
Rows whose host or network is not published are listed and not scored.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.published.predict import Prediction, errors_of, machine_rows, prediction, read_options
from benchmarks.published.rows import Row, held_out_rows
from benchmarks.report import hardware

GROUP = 0.25
"""What no group's median error is to be beyond."""

_ONE_GPU = {"8xh100": "h100", "8xa100": "a100", "8xa100-40gb": "a100"}
"""By machine, the file of one of its GPUs, in whose rows its matrix products were fitted."""


def group_of(row: Row) -> str:
    """Return the group that a row is held out with."""
    return f"{row.system} on {row.machine}"


def held_out(machines: Sequence[str] = ()) -> Iterator[Prediction]:
    """Yield the rows of some machines, or of all, with what the planner says, without those left out."""
    for row in held_out_rows():
        if row.left_out or (machines and row.machine not in machines):
            continue
        yield prediction(row, machine_rows()[_ONE_GPU[row.machine]][0])


def table(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    heads = "group", "GPUs", "model", "tokens of a row", "of a micro-batch", "published", "planned", "error"
    yield f"| {' | '.join(heads)} | FLOPs alone |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in found:
        row = one.row
        again = ", run again" if row.recomputed else ""
        yield (
            f"| {group_of(one.row)} | {row.gpus * row.nodes} | {row.model}{again} | {row.seq_len:,} "
            f"| {row.micro_batch_size * row.seq_len:,} | {row.tokens_per_s:,.0f} | {one.predicted:,.0f} "
            f"| {one.error:+.1%} | {one.flops_error:+.1%} |"
        )


def summary(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the errors of each group and of all."""
    yield "| group | rows | median error | worst | beyond 25 % | FLOPs alone: median | worst |"
    yield "|---|---|---|---|---|---|---|"
    for name in (*dict.fromkeys(group_of(one.row) for one in found), "all"):
        some = [one for one in found if name in (group_of(one.row), "all")]
        yield errors_of(name, [one.error for one in some], [one.flops_error for one in some])


def medians(found: Sequence[Prediction]) -> dict[str, float]:
    """Return the median error of each group, and of all."""
    groups = {"all": [one.error for one in found]}
    for one in found:
        groups.setdefault(group_of(one.row), []).append(one.error)
    return {name: statistics.median(map(abs, errors)) for name, errors in sorted(groups.items())}


def runs_before(path: Path) -> list[dict[str, Any]]:
    """Return the runs that a saved file tells of."""
    return list(json.loads(path.read_text())["runs"]) if path.exists() else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it where `--out` says, with one run more."""
    options = read_options(__doc__, arguments)
    found = list(held_out(options.machine))
    left = [row for row in held_out_rows() if row.left_out]
    lines = [*summary(found), "", *table(found), "", f"Listed, and not scored: {len(left)} rows.", ""]
    lines += [
        f"- {group_of(row)}, {row.gpus * row.nodes} GPUs, {row.model}, {row.seq_len:,} tokens: {row.left_out}"
        for row in left
    ]
    print("\n".join(lines))
    if options.out is not None:
        saved = options.out / "published-held-out.json"
        of_run = {"date": date.today().isoformat(), "commit": hardware()["commit"], "medians": medians(found)}
        runs = [*runs_before(saved), of_run]
        result = {
            "benchmark": "published, held out",
            "runs": runs,
            "rows": [
                asdict(one.row)
                | {"predicted": one.predicted, "error": one.error, "flops_error": one.flops_error}
                | {"bound": one.bound}
                for one in found
            ],
            "hardware": hardware(),
        }
        lines = [f"Run {len(runs)} of these rows.", "", *lines]
        (options.out / "published-held-out.md").write_text("\n".join(lines) + "\n")
        saved.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"benchmark": "published, held out", "medians": medians(found)}))


if __name__ == "__main__":
    main()
