"""Published rows of models with experts, predicted by the planner, beside FLOPs alone.

    python -m benchmarks.published.experts [--out benchmarks/results]

A group is a system on a machine. The groups that `experts.json` names under `held_out` were found, and
committed, before any of them was predicted; the cost model may be changed after a look at the others alone.
`--out` therefore adds a line for every run to the saved file: when it was, at which commit, and what came
out. Rows whose settings are not published, or whose parallelism the planner does not know, are listed and
not scored.

No rate is fitted to a row here. FLOPs alone go by the fitted row of one H100, times what the datasheet of
another device says of its products.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date

from benchmarks.published.held_out import group_of, medians, runs_before, summary
from benchmarks.published.predict import Prediction, machine_rows, prediction, read_options
from benchmarks.published.rows import (
    Row,
    expert_rows,
    held_out_groups,
    machine_named,
    unscored_expert_rows,
)
from benchmarks.report import hardware

_FITTED = "h100"
"""The machine whose fitted row FLOPs alone go by."""


def is_held_out(row: Row) -> bool:
    """Return whether no model was made with a row's group."""
    return group_of(row) in held_out_groups()


def predicted_rows() -> Iterator[Prediction]:
    """Yield all scored rows with what the planner says."""
    fitted = machine_rows()[_FITTED][0]
    peak = machine_named(_FITTED).peak_flops_per_s["bf16"]
    for row in expert_rows():
        found = prediction(row, fitted)
        share = machine_named(row.machine).peak_flops_per_s["bf16"] / peak
        yield replace(found, by_flops=found.by_flops * share)


def table(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    heads = "group", "GPUs", "model", "tokens of a row", "of a micro-batch", "experts over", "published"
    yield f"| {' | '.join(heads)} | planned | error | FLOPs alone | |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for one in found:
        row = one.row
        yield (
            f"| {group_of(row)} | {row.gpus * row.nodes} | {row.model} | {row.seq_len:,} "
            f"| {row.micro_batch_size * row.seq_len:,} | {row.experts} | {row.tokens_per_s:,.0f} "
            f"| {one.predicted:,.0f} | {one.error:+.1%} | {one.flops_error:+.1%} "
            f"| {'held out' if is_held_out(row) else 'seen'} |"
        )


def report(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the lines of what was found: groups held out, groups seen, all rows, and those not scored."""
    held, seen = split(found)
    yield from ("Held out:", "", *summary(held), "", "Seen:", "", *summary(seen), "", *table(found), "")
    listed = unscored_expert_rows()
    yield from (f"Listed, and not scored: {len(listed)}.", "")
    for one in listed:
        yield f"- {one['run']}: {one['settings']}; {one['rate']}. Not scored: {one['why']}."


def split(found: Sequence[Prediction]) -> tuple[list[Prediction], list[Prediction]]:
    """Return the rows that are held out, and the others."""
    held = [one for one in found if is_held_out(one.row)]
    return held, [one for one in found if not is_held_out(one.row)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and write them where `--out` says, with one run more."""
    options = read_options(__doc__, arguments)
    found = list(predicted_rows())
    lines = list(report(found))
    print("\n".join(lines))
    held, seen = split(found)
    of_run = {"held out": medians(held), "seen": medians(seen)}
    if options.out is not None:
        saved = options.out / "published-experts.json"
        runs = [
            *runs_before(saved),
            {"date": date.today().isoformat(), "commit": hardware()["commit"], "medians": of_run},
        ]
        result = {
            "benchmark": "published, experts",
            "runs": runs,
            "rows": [
                asdict(one.row)
                | {"held_out": is_held_out(one.row), "predicted": one.predicted, "error": one.error}
                | {"flops_error": one.flops_error, "bound": one.bound}
                for one in found
            ],
            "hardware": hardware(),
        }
        (options.out / "published-experts.md").write_text(
            "\n".join([f"Run {len(runs)} of these rows.", "", *lines]) + "\n"
        )
        saved.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"benchmark": "published, experts", "medians": of_run}))


if __name__ == "__main__":
    main()
