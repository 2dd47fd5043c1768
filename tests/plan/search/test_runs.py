"""What the search offers where gradients add up in several runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.config.choice import Choice, StepBatch
from megatrain.errors import ConfigError
from megatrain.plan.search.choices import is_allowed, least, lockstep_sizes
from megatrain.plan.search.request import Request
from tests.plan.anatomies import Shape, llama_like, machine


def request_of(*, tied: bool, num_runs: int, choice: Choice | None = None) -> Request:
    """Ask for a step of 8 micro-batches, whose head is in chunks."""
    anatomy = llama_like(Shape(num_layers=3), micro_batch_size=1, seq_len=64)
    assert anatomy.head_is_chunked
    if tied:
        anatomy = replace(anatomy, outer=tuple(part for part in anatomy.outer if part.kind != "head"))
    batch = StepBatch(micro_batch_size=1, seq_len=64, num_micro_batches=8, num_runs=num_runs)
    return Request(spec=machine(), anatomy=anatomy, batch=batch, choice=choice or Choice())


@pytest.mark.parametrize(
    ("tied", "num_runs", "expected"),
    [(False, 4, [8, 4, 2, 1]), (True, 1, [8, 4, 2, 1]), (True, 4, [2, 1]), (True, 8, [1])],
)
def test_a_tied_head_in_chunks_has_rounds_inside_one_run(
    tied: bool, num_runs: int, expected: list[int]
) -> None:
    """Its gradient comes twice, and a run that is complete takes no more: the engine refuses the step."""
    request = request_of(tied=tied, num_runs=num_runs)
    assert lockstep_sizes(request) == expected
    frame = replace(Choice().with_defaults(3), num_gradient_buffers=2)
    allowed = [count for count in (8, 4, 2, 1) if is_allowed(request, replace(frame, lockstep=count))]
    assert allowed == expected
    assert least(request).lockstep in expected


@pytest.mark.parametrize(("rows_each", "expected"), [(1, [8, 4, 2, 1]), (2, [2, 1])])
def test_a_tied_head_of_judged_answers_is_in_chunks_however_short_they_are(
    rows_each: int, expected: list[int]
) -> None:
    """It runs row by row: the engine used to refuse the step when the whole reference was computed."""
    request = request_of(tied=True, num_runs=4)
    anatomy = replace(request.anatomy, head_is_chunked=False)
    assert not anatomy.head_is_chunked
    batch = replace(request.batch, micro_batch_size=rows_each, rows_each=rows_each)
    assert lockstep_sizes(replace(request, anatomy=anatomy, batch=batch)) == expected


def test_rounds_of_several_runs_are_refused_with_a_tied_head_in_chunks() -> None:
    request = request_of(tied=True, num_runs=4, choice=Choice(lockstep=4))
    with pytest.raises(ConfigError, match="lockstep divides the micro-batches of a run"):
        least(request)
    assert least(request_of(tied=True, num_runs=2, choice=Choice(lockstep=4))).lockstep == 4
