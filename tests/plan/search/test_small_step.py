"""What a larger step gains is planned again, and the smallest step that gains nearly all of it is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.config.choice import StepBatch
from megatrain.hardware import load_machine
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request
from megatrain.plan.search.small_step import larger_step
from tests.plan.anatomies import Shape, llama_like

SHAPE = Shape(num_layers=24, hidden=2048, inner=8192, vocab=32000)


def request(num_micro_batches: int, *, rows: int = 1, seq_len: int = 512) -> Request:
    return Request(
        spec=load_machine("rtx-4090").with_drive_bytes(0),
        anatomy=llama_like(SHAPE, micro_batch_size=rows, seq_len=seq_len),
        batch=StepBatch(micro_batch_size=rows, seq_len=seq_len, num_micro_batches=num_micro_batches),
    )


def test_a_larger_step_is_as_much_faster_as_is_said() -> None:
    small = request(1)
    plan = make_plan(small, budget=2_000)
    larger = larger_step(small, plan)
    assert larger is not None
    assert larger.gain > 2
    assert 2 < larger.factor <= 256
    speeds = {
        factor: make_plan(request(factor), budget=2_000).tokens_per_s
        for factor in (larger.factor, larger.factor // 2)
    }
    assert speeds[larger.factor] / plan.tokens_per_s == pytest.approx(larger.gain, rel=0.1)
    assert speeds[larger.factor] > speeds[larger.factor // 2] > plan.tokens_per_s
    assert larger.text(plan, "train.grad_accumulation=N") == (
        f"a step of 512 tokens is small: what takes longest is {plan.bound}; train.grad_accumulation=N "
        f"makes training {larger.gain:.1f} times faster"
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "asked", [request(256), request(1, rows=64, seq_len=2048)], ids=["usual", "one large"]
)
def test_nothing_is_said_of_a_step_of_the_usual_size(asked: Request) -> None:
    assert larger_step(asked, make_plan(asked, budget=1_000)) is None


def test_nothing_is_said_where_products_are_nearly_all_that_takes_time() -> None:
    spec = replace(load_machine("rtx-4090"), matmul_flops_per_s={"bf16": 1e12})
    slow = replace(request(1), spec=spec)
    assert larger_step(slow, make_plan(slow, budget=1_000)) is None
