"""What the search offers where gradients add up in several runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.config.choice import Choice, StepBatch
from megatrain.plan.search.choices import least
from megatrain.plan.search.options import is_allowed, lockstep_sizes
from megatrain.plan.search.request import Request
from tests.plan.anatomies import Shape, llama_like, machine


@pytest.mark.parametrize("num_runs", [1, 4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_rounds_of_several_runs_may_be_of_any_size(tied: bool, num_runs: int) -> None:
    """Also with a tied head in chunks: its gradient comes once per micro-batch."""
    anatomy = llama_like(Shape(num_layers=3), micro_batch_size=1, seq_len=64)
    if tied:
        anatomy = replace(anatomy, outer=tuple(part for part in anatomy.outer if part.kind != "head"))
    batch = StepBatch(micro_batch_size=1, seq_len=64, num_micro_batches=8, num_runs=num_runs)
    request = Request(spec=machine(), anatomy=anatomy, batch=batch, choice=Choice())
    assert lockstep_sizes(request) == [8, 4, 2, 1]
    frame = replace(Choice().with_defaults(3), num_gradient_buffers=2)
    assert all(is_allowed(request, replace(frame, lockstep=count)) for count in (8, 4, 2, 1))
    assert least(replace(request, choice=Choice(lockstep=8))).lockstep == 8
