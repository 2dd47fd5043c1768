"""Plans hold together: bytes within limits, times above bounds, and what would fit where nothing does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.model.anatomy import Anatomy
from megatrain.plan.choice import Batch, Plan
from megatrain.plan.listing import least_bytes
from megatrain.plan.planner import make_plan, plan_of
from megatrain.plan.remedies import size_option
from megatrain.plan.request import Request, overflow
from tests.plan.anatomies import Shape, llama_like, machine

SHAPE = Shape(num_layers=6)
BATCH = Batch(micro_batch_size=2, seq_len=1024, num_micro_batches=4)


def count(**changes: Any) -> Anatomy:
    return llama_like(SHAPE, **{"micro_batch_size": 2, "seq_len": 1024, **changes})


def request(**changes: Any) -> Request:
    return Request(**{"spec": machine(), "anatomy": count(), "batch": BATCH, **changes})


def check(plan: Plan) -> None:
    assert plan.fits
    for tier, limit in plan.limits.items():
        assert plan.tier_bytes(tier) <= limit
    assert plan.step_s >= 0.999 * max(plan.bounds_s.values())
    assert plan.bounds_s[plan.bound] == max(plan.bounds_s.values())
    assert plan.tokens_per_s == pytest.approx(plan.batch.tokens / plan.step_s)
    assert 0 < plan.mfu <= plan.hardware_mfu <= 1


def test_a_plan_holds_together() -> None:
    check(make_plan(request()))


def test_a_choice_that_is_given_is_described_as_it_is() -> None:
    made = make_plan(request())
    slower = replace(made.choice, num_slots=1, resident_layers=0, outer_resident=False)
    assert plan_of(request(), slower).step_s >= made.step_s * 0.999
    tight = plan_of(request(host_limit=1 << 20), made.choice)
    assert not tight.fits
    assert tight.problem.startswith("host memory: at least")


def test_least_bytes_are_enough_and_no_byte_less_is() -> None:
    for tier, name in (("ram", "host_limit"), ("device", "device_limit")):
        need = least_bytes(request(), tier)
        assert need is not None
        assert make_plan(request(**{name: need}), budget_s=0.01).fits
        assert not make_plan(request(**{name: need - 1}), budget_s=0.01).fits


def test_settings_that_exclude_every_choice_are_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        make_plan(request(fixed={"fragments": True, "num_slots": 1}))


def test_given_residents_count_in_what_is_too_large() -> None:
    tight = request(device_limit=60 << 20, fixed={"resident_layers": 6})
    plan = make_plan(tight)
    assert not plan.fits
    assert overflow(tight, plan.choice)
    assert plan.choice.resident_layers == 6


@pytest.mark.parametrize(
    ("nbytes", "text"), [(1, "1MiB"), (100 << 30, "100GiB"), ((100 << 30) + 1, "101GiB")]
)
def test_sizes_are_rounded_up(nbytes: int, text: str) -> None:
    assert size_option(nbytes) == text
