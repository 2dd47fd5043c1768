"""Published rows of models with experts: what GPUs exchange that share them out, and what was predicted."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.published.expert_parallel import sent_tokens
from benchmarks.published.experts import is_held_out, predicted_rows
from benchmarks.published.held_out import group_of
from benchmarks.published.rows import (
    Row,
    anatomy_of,
    expert_rows,
    held_out_groups,
    held_out_rows,
    machine_named,
    rows,
    scaling_rows,
    step_of,
    unscored_expert_rows,
)

SAVED = Path(__file__).parents[1] / "benchmarks/results/published-experts.json"

FIRST, CHARGED = 0, 1
"""The runs of the rows: before what is exchanged was charged, and after."""


def test_half_of_the_rows_are_held_out_in_groups_of_systems_that_no_other_row_has() -> None:
    groups = {group_of(row) for row in expert_rows()}
    held = [row for row in expert_rows() if is_held_out(row)]
    assert set(held_out_groups()) < groups
    assert len(expert_rows()) >= 8
    assert 2 * len(held) >= len(expert_rows())
    known = {row.system for row in (*rows(), *scaling_rows(), *held_out_rows())}
    assert not known & {row.system for row in expert_rows()}


def test_no_row_is_fitted_and_experts_are_shared_out_within_a_node() -> None:
    for row in expert_rows():
        assert not row.is_fitted
        assert not row.left_out
        assert machine_named(row.machine).num_gpus == row.gpus
        assert row.gpus % row.experts == 0


def test_what_is_not_scored_says_of_what_run_and_why() -> None:
    for one in unscored_expert_rows():
        assert set(one) == {"run", "settings", "rate", "why"}
        assert all(one.values())


@pytest.mark.parametrize(("num_experts", "top_k", "ways"), [(8, 2, 4), (8, 3, 2), (6, 2, 6)])
def test_a_token_goes_as_often_as_all_ways_to_route_it_say(num_experts: int, top_k: int, ways: int) -> None:
    """GPU 0 sends it; every choice of its experts is as likely as any other."""
    chosen = list(combinations(range(num_experts), top_k))
    owners = [[expert * ways // num_experts for expert in one] for one in chosen]
    each = statistics.mean(sum(owner != 0 for owner in one) for one in owners)
    once = statistics.mean(len(set(one) - {0}) for one in owners)
    assert sent_tokens(num_experts, top_k, ways, is_once=False) == pytest.approx(each)
    assert sent_tokens(num_experts, top_k, ways, is_once=True) == pytest.approx(once)


def shared_out() -> Row:
    """Return a row whose GPUs send a token once for each expert."""
    return next(row for row in expert_rows() if row.system == "torchtitan, Qwen3 experiments")


def test_a_gpu_has_its_part_of_the_experts_and_all_of_the_rest() -> None:
    row = shared_out()
    (own,) = anatomy_of(row).layers[0].fragments
    (whole,) = anatomy_of(replace(row, experts=1)).layers[0].fragments
    experts = 128 * 3 * 2048 * 768
    assert whole.num_params - own.num_params == experts * (row.experts - 1) // row.experts
    assert own.sizes.num_state / whole.sizes.num_state == pytest.approx(own.num_params / whole.num_params)


def test_a_dispatch_and_a_combine_are_charged_in_each_pass_at_the_rate_of_peers() -> None:
    row = replace(shared_out(), recomputed=0.0)
    machine = machine_named(row.machine)
    assert machine.peer_bytes_per_s is not None
    anatomy = anatomy_of(row)
    exchanged = row.micro_batch_size * row.seq_len * 8 * (1 - 1 / row.experts) * 2048 * 2
    for pass_ in (anatomy.layers[0].forward, anatomy.layers[0].backward):
        assert pass_.swapped_bytes == pytest.approx(2 * exchanged)
    seconds = 4 * 48 * exchanged / machine.peer_bytes_per_s
    faster = replace(machine, peer_bytes_per_s=1e3 * machine.peer_bytes_per_s)
    less = step_of(row, machine).compute_s - step_of(row, faster).compute_s
    assert less == pytest.approx(seconds, rel=2e-3)


def test_the_saved_figures_are_of_these_rows_and_nearer_than_flops_alone() -> None:
    saved = json.loads(SAVED.read_text())
    assert [(one["machine"], one["model"], one["tokens_per_s"]) for one in saved["rows"]] == [
        (row.machine, row.model, row.tokens_per_s) for row in expert_rows()
    ]
    assert all(abs(one["error"]) < abs(one["flops_error"]) for one in saved["rows"])
    held = [one for one in saved["rows"] if one["held_out"]]
    last = saved["runs"][-1]["medians"]["held out"]
    assert last["all"] == pytest.approx(statistics.median(abs(one["error"]) for one in held))
    assert set(last) == {*held_out_groups(), "all"}
    runs = [run["medians"] for run in saved["runs"]]
    for kind in ("held out", "seen"):
        assert runs[CHARGED][kind]["all"] < runs[FIRST][kind]["all"]


@pytest.mark.parity
def test_every_row_is_predicted_as_saved() -> None:
    saved = json.loads(SAVED.read_text())["rows"]
    for one, before in zip(predicted_rows(), saved, strict=True):
        assert one.error == pytest.approx(before["error"], abs=1e-3), one.row
