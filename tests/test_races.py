"""`benchmarks.races.schedules`: every side does its best, in the same memory."""

from __future__ import annotations

import pytest

from benchmarks.published.rows import choice_of, machine_of
from benchmarks.races.schedules import ours, request_of, rival, rows_of, table
from megatrain.hardware import load_machine
from megatrain.plan.cost.rates import Kernels, Rates
from megatrain.plan.cost.step_time import Step
from megatrain.plan.search.request import overflow

MODEL, MACHINE, TOKENS = "Llama-3.2-1B", "rtx-4090", 16_384


@pytest.mark.parity
def test_a_rival_takes_the_best_of_its_micro_batches_and_policies() -> None:
    spec = load_machine(MACHINE)
    steps = {}
    for row in rows_of("ZeRO-3 offload", MACHINE, MODEL, TOKENS):
        request, choice = request_of(row, spec), choice_of(row)
        rates = Rates(
            machine_of(row, spec),
            "bf16",
            kernels=Kernels(fuses_layers=True),
            head_dim=request.anatomy.head_dim,
        )
        if "device" not in overflow(request, choice):
            key = row.num_micro_batches, "keep" in choice.activations
            steps[key] = Step(rates, request.anatomy, choice, row.batch).step_s
    assert len({kept for _, kept in steps}) == 2, "with activation checkpoints, and without"
    best = rival("ZeRO-3 offload", MACHINE, MODEL, TOKENS, "same")
    assert best is not None
    assert best.step_s == pytest.approx(min(steps.values()))
    assert best.over_compute > 1


@pytest.mark.parity
def test_ours_is_beside_them_in_the_table() -> None:
    first, second = ours(MACHINE, MODEL, TOKENS), rival("MegaTrain", MACHINE, MODEL, TOKENS, "own")
    assert first is not None
    assert second is not None
    *_, ours_line, rival_line = table([first, second])
    assert f"{first.tokens_per_s / second.tokens_per_s:.2f}" in rival_line
    assert "| ours |" in ours_line
    assert first.tokens_per_s == pytest.approx(TOKENS / first.step_s)
