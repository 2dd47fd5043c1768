"""What is watched of the state in RAM, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.plan import Plan
from megatrain.plan.cost.watching import HASHED, STEP_SHARE, rotation_of, watching
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request
from tests.plan.anatomies import Shape, llama_like, machine

ANATOMY = llama_like(Shape())
BATCH = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=2)
REQUEST = Request(spec=machine(), anatomy=ANATOMY, batch=BATCH, choice=Choice(resident_layers=0))


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = make_plan(REQUEST, budget=1)
    assert made.fits
    return made


@pytest.mark.parametrize(
    ("wish", "whole_s", "step_s", "rotation"),
    [
        ("off", 1.0, 1.0, None),
        ("auto", 0.0, 1.0, 1),
        ("auto", 0.01, 1.0, 1),
        ("auto", 0.011, 1.0, 2),
        ("auto", 8.0, 34.0, 24),
        (1.0, 8.0, 34.0, 1),
        (0.3, 8.0, 34.0, 3),
        (0.001, 8.0, 34.0, 1000),
    ],
)
def test_rotation(wish: float | str, whole_s: float, step_s: float, rotation: int | None) -> None:
    assert rotation_of(wish, whole_s, step_s) == rotation


def test_watching_takes_a_hundredth_of_a_step_and_no_less_than_it_may(plan: Plan) -> None:
    step = REQUEST.step(plan.choice)
    found = watching(plan, step, "auto")
    assert found.state_bytes + found.unwatched_bytes == 12 * ANATOMY.num_params
    assert found.frozen_bytes == 0
    assert found.rotation is not None
    whole_s = HASHED * step.rates.update_s(2 * found.state_bytes)
    assert found.seconds == pytest.approx(whole_s / found.rotation)
    assert found.seconds <= STEP_SHARE * plan.step_s
    assert found.rotation == 1 or whole_s / (found.rotation - 1) > STEP_SHARE * plan.step_s
    faster = watching(replace(plan, step_s=plan.step_s / 10), step, "auto")
    assert faster.rotation == pytest.approx(10 * found.rotation, abs=10)


def test_state_that_is_updated_on_the_device_is_not_watched(plan: Plan) -> None:
    num_layers = len(ANATOMY.layers)
    choice = replace(plan.choice, resident_layers=num_layers, outer_resident=True)
    found = watching(plan, REQUEST.step(choice), 0.5)
    assert (found.rotation, found.share) == (2, 0.5)
    assert found.state_bytes == 0
    assert found.unwatched_bytes == 12 * ANATOMY.num_params


def test_several_ranks_watch_a_share_each(plan: Plan) -> None:
    both = replace(REQUEST, batch=replace(BATCH, num_ranks=2, num_micro_batches=1))
    whole = watching(plan, REQUEST.step(plan.choice), 0.5)
    half = watching(plan, both.step(plan.choice), 0.5)
    assert 2 * half.state_bytes == pytest.approx(whole.state_bytes, rel=1e-4)
