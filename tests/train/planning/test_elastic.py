"""A run that measures other rates than planned plans anew, and only then."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.plan import Plan
from megatrain.plan.cost.measured import Measured
from megatrain.plan.cost.step_time import Step
from megatrain.plan.search.planner import make_plan, plan_of
from megatrain.plan.search.request import Request
from megatrain.train.planning import elastic as elastic_module
from megatrain.train.planning.elastic import GAIN, WARM_UP_STEPS, Elastic, describe_change
from tests.plan.anatomies import Shape, llama_like, machine

BATCH = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=2)


@dataclass
class Engine:
    """Takes note of what it is told."""

    given: list[Choice] = field(default_factory=list)
    together: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(planned_tokens=0))

    def reconfigure(self, choice: Choice) -> None:
        self.given.append(choice)


@dataclass
class Report:
    """What a step at some rates reports."""

    lane_seconds: dict[str, float]
    fetch_bytes: int
    restored_bytes: int
    offload_bytes: int
    saved_bytes: int
    update_bytes: int


TO_THE_END = 10**9
"""Operations with which every search ends by itself."""


def planned(link: float = 4e9, device_bytes: int = 140 << 20) -> tuple[Request, Plan]:
    spec = replace(machine(link=link, device_bytes=device_bytes), device="emulated")
    given = Choice(
        fragments=False,
        boundaries="device",
        gradients=("host",) * 8,
        updates="deferred",
        lockstep=2,
        resident_layers=0,
        outer_resident=False,
    )
    request = Request(spec=spec, anatomy=llama_like(Shape(num_layers=8)), batch=BATCH, choice=given)
    plan = make_plan(request, budget=TO_THE_END)
    assert plan.fits
    return request, plan


def report_of(request: Request, choice: Choice) -> Any:
    """Report a step of a choice as a machine with the request's rates would."""
    step = Step(request.rates, request.anatomy, choice, request.batch)
    spec, moved = request.spec, plan_of(request, choice).bytes_per_step
    up, down = moved["fetched"] + moved["restored"], moved["offloaded"] + moved["saved"]
    updated = 26 * 10**6
    return Report(
        lane_seconds={
            "compute": step.compute_s,
            "fetch": up / spec.h2d_bytes_per_s,
            "offload": down / spec.d2h_bytes_per_s,
            "host": updated / 26 / spec.update_rate,
        },
        fetch_bytes=moved["fetched"],
        restored_bytes=moved["restored"],
        offload_bytes=moved["offloaded"],
        saved_bytes=moved["saved"],
        update_bytes=updated,
    )


def test_a_machine_as_planned_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_module, "SEARCH_OPERATIONS", TO_THE_END)
    request, plan = planned()
    engine = Engine()
    elastic = Elastic(engine, request, plan)  # type: ignore[arg-type]
    for _ in range(6):
        assert elastic.after_step(report_of(request, plan.choice)) == ""
    assert engine.given == []


def test_a_throttled_link_is_planned_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_module, "SEARCH_OPERATIONS", TO_THE_END)
    request, plan = planned()
    assert "offload" in plan.choice.activations, "a fast link is used"
    engine = Engine()
    elastic = Elastic(engine, request, plan)  # type: ignore[arg-type]
    for _ in range(WARM_UP_STEPS + 1):
        elastic.after_step(report_of(request, plan.choice))
    slow = replace(
        request, spec=replace(request.spec, h2d_bytes_per_s=2e8, d2h_bytes_per_s=2e8, launch_s=0.0)
    )
    message = elastic.after_step(report_of(slow, plan.choice))
    (choice,) = engine.given
    before, after = plan_of(slow, plan.choice).step_s, plan_of(slow, choice).step_s
    assert after < (1 - GAIN) * before
    best = make_plan(slow, budget=TO_THE_END).step_s
    assert best >= 0.95 * after
    assert engine.together.planned_tokens == plan_of(slow, choice).tokens_together > 0
    assert "GB/s" in message
    assert "activations" in message
    assert elastic.num_changes == 1


def test_a_search_that_its_budget_ended_goes_on_after_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    request, plan = planned()
    slow = replace(
        request, spec=replace(request.spec, h2d_bytes_per_s=2e8, d2h_bytes_per_s=2e8, launch_s=0.0)
    )
    better, given = make_plan(slow, budget=TO_THE_END).choice, []

    def search(asked: Request, *, budget: int) -> Plan:
        given.append(budget)
        if len(given) < 3:  # nothing better so far
            return replace(plan_of(asked, plan.choice), is_cut_short=True)
        return plan_of(asked, better)

    first = elastic_module.SEARCH_OPERATIONS
    monkeypatch.setattr(elastic_module, "MOST_BUDGET", 8 * first)
    monkeypatch.setattr(elastic_module, "make_plan", search)
    engine = Engine()
    elastic = Elastic(engine, request, plan)  # type: ignore[arg-type]
    for _ in range(WARM_UP_STEPS + 5):
        elastic.after_step(report_of(slow, plan.choice if not engine.given else better))
    assert engine.given == [better]
    assert given == [first * times for times in (1, 2, 4)]


def test_warm_up_is_not_measured() -> None:
    request, plan = planned()
    engine = Engine()
    elastic = Elastic(engine, request, plan)  # type: ignore[arg-type]
    slow = replace(request, spec=replace(request.spec, h2d_bytes_per_s=2e8, d2h_bytes_per_s=2e8))
    for _ in range(WARM_UP_STEPS):
        assert elastic.after_step(report_of(slow, plan.choice)) == ""
    assert engine.given == []


def test_rates_are_work_over_time() -> None:
    seconds = {"fetch": 2.0, "restore": 1.0, "offload": 4.0, "host": 0.5, "compute": 3.0}
    measured = Measured.of(seconds, {"fetch": 6e9, "offload": 2e9, "host": 13e9}, 1.5)
    assert measured == Measured(
        fetch_bytes_per_s=2e9, offload_bytes_per_s=5e8, update_bytes_per_s=2.6e10, compute_scale=2.0
    )
    spec = machine(flops=1e12)
    found = measured.applied(spec)
    assert (found.h2d_bytes_per_s, found.d2h_bytes_per_s, found.update_rate) == (2e9, 5e8, 1e9)
    assert found.matmul_flops_per_s["bf16"] == 5e11
    assert found.device_bytes_per_s == spec.device_bytes_per_s / 2


def test_an_idle_lane_says_nothing() -> None:
    measured = Measured.of({"compute": 1.0}, {"fetch": 0.0, "offload": 0.0, "host": 0.0}, 1.0)
    assert measured == Measured(compute_scale=1.0)
    assert machine().h2d_bytes_per_s == measured.applied(machine()).h2d_bytes_per_s


@pytest.mark.parametrize(
    ("now", "share", "expected"),
    [(1.05e9, 0.1, ""), (2e9, 0.1, "copies to the device 1 GB/s -> 2 GB/s"), (5e8, 0.9, "copies to the d")],
)
def test_only_a_large_change_is_one(now: float, share: float, expected: str) -> None:
    then = Measured(fetch_bytes_per_s=1e9)
    assert Measured(fetch_bytes_per_s=now).differs(then, share).startswith(expected)
    assert bool(Measured(fetch_bytes_per_s=now).differs(then, share)) == bool(expected)


def test_a_change_is_described() -> None:
    old = Choice(activations=("keep", "recompute")).with_defaults(2)
    new = replace(old, num_slots=3, activations=("keep", "keep"))
    assert describe_change(old, new) == "num_slots 2 -> 3, activations 1 keep + 1 recompute -> 2 keep"
