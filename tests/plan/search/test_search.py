"""The search finds the best choice: nothing that fits is faster, over everything that can be chosen."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.policies import POLICY_NAMES
from megatrain.hardware import HardwareSpec
from megatrain.plan.cost.step_time import Step
from megatrain.plan.cost.timetable import Task
from megatrain.plan.search import request as request_module
from megatrain.plan.search import search as search_module
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request, overflow
from megatrain.plan.search.search import search
from tests.plan.anatomies import Shape, llama_like, machine

MACHINES: dict[str, HardwareSpec] = {
    "slow link": machine(link=2e8, update_rate=1e9),
    "fast link": machine(link=1e11),
    "slow host": machine(link=2e9, update_rate=2e6),
    "slow compute": machine(flops=1e11),
    "tiny device": machine(device_bytes=40 << 20),
    "nothing in excess": machine(
        device_bytes=60 << 20, link=2e9, update_rate=3e8, flops=4e12, both_share=0.8, launch_s=1e-5
    ),
}
EXTREMES = ("keep", "offload", "recompute")
BATCHES = {
    "one": StepBatch(micro_batch_size=1, seq_len=256, num_micro_batches=1),
    "three": StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=3),
    "four": StepBatch(micro_batch_size=2, seq_len=512, num_micro_batches=4),
}


def request_for(name: str, num_layers: int, batch: str, *, clips: bool) -> Request:
    shape = BATCHES[batch]
    anatomy = llama_like(
        Shape(num_layers=num_layers), micro_batch_size=shape.micro_batch_size, seq_len=shape.seq_len
    )
    return Request(spec=MACHINES[name], anatomy=anatomy, batch=shape, clips=clips)


def everything(
    request: Request, *, policies: tuple[str, ...] = POLICY_NAMES, coarsely: bool = False
) -> Iterator[Choice]:
    """Yield every choice that the engine can run, whether or not it fits.

    Args:
        request: What is asked for.
        policies: Of activations; each layer has any of them.
        coarsely: Of slots, buffers and micro-batches of a round, only the fewest, one more, and all.
    """
    num_layers, count = len(request.anatomy.layers), request.batch.num_micro_batches
    updates = ["deferred"] if request.clips else ["deferred", "immediate"]
    for fragments, lockstep, boundaries, when, gradients, sums, outer, residents in product(
        (False, True),
        sorted({1, count}) if coarsely else range(1, count + 1),
        ("device", "host"),
        updates,
        range(num_layers + 1),
        ("device", "host"),
        (False, True),
        range(num_layers + 1),
    ):
        if gradients and (when != "deferred" or lockstep < count):
            continue  # they wait for a norm, which is of one round
        if sums == "host" and lockstep == count:
            continue  # one round has nothing to add
        parts = 2 if fragments else 1
        most = num_layers * parts
        all_slots = sorted({parts, parts + 1, most} if coarsely else range(parts, most + 1))
        all_buffers = (parts, parts + 1) if coarsely else (parts, parts + 1, 2 * parts + 1)
        for slots, buffers in product([n for n in all_slots if n <= most], all_buffers):
            for activations in product(policies, repeat=num_layers):
                yield Choice(
                    num_slots=slots,
                    num_gradient_buffers=buffers,
                    activations=activations,
                    boundaries=boundaries,
                    fragments=fragments,
                    resident_layers=residents,
                    outer_resident=outer,
                    lockstep=lockstep,
                    updates=when,
                    gradients=("device",) * gradients + ("host",) * (num_layers - gradients),
                    sums=sums,
                ).with_defaults(num_layers)


def fastest(request: Request, than_s: float, choices: Iterable[Choice]) -> tuple[float, Choice | None]:
    """Return the best of the choices that is faster than so many seconds; bounds rule most of them out."""
    best_s, best = than_s, None
    for choice in choices:
        step = Step(request.rates, request.anatomy, choice, request.batch)
        if max(step.bounds_s.values()) < best_s and not overflow(request, choice) and step.step_s < best_s:
            best_s, best = step.step_s, choice
    return best_s, best


def check(request: Request, **grid: Any) -> None:
    found = search(request, budget=10**9)
    if found is None:
        assert all(overflow(request, choice) for choice in everything(request, **grid))
        return
    assert not overflow(request, found.choice)
    limit_s = 0.999 * found.step.step_s
    better_s, better = fastest(request, limit_s, everything(request, **grid))
    assert better is None, f"{better_s / found.step.step_s:.4f} of {found.choice}: {better}"


@pytest.mark.parametrize(
    ("name", "num_layers", "batch", "clips"),
    [
        pytest.param("slow link", 1, "three", True, marks=pytest.mark.parity),
        pytest.param("slow host", 2, "one", True, marks=pytest.mark.parity),
        pytest.param("slow compute", 1, "one", False, marks=pytest.mark.parity),
        ("tiny device", 1, "four", True),
    ],
)
def test_nothing_that_fits_is_faster(name: str, num_layers: int, batch: str, clips: bool) -> None:
    check(request_for(name, num_layers, batch, clips=clips))


@pytest.mark.parity
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("name", MACHINES)
def test_nothing_that_fits_is_faster_on_any(name: str, num_layers: int, batch: str, clips: bool) -> None:
    check(request_for(name, num_layers, batch, clips=clips))


def random_request(seed: int, num_layers: int, num_micro_batches: int) -> Request:
    """Return a request to a machine whose rates and sizes are drawn evenly on a logarithmic scale."""
    draw = random.Random(f"{seed} {num_layers} {num_micro_batches}")
    batch = StepBatch(
        micro_batch_size=1, seq_len=draw.choice((256, 1024)), num_micro_batches=num_micro_batches
    )
    spec = machine(
        device_bytes=int(2 ** draw.uniform(5.2, 8)) << 20,
        link=10 ** draw.uniform(8.5, 11),
        update_rate=10 ** draw.uniform(7, 10),
        flops=10 ** draw.uniform(11, 13.5),
        both_share=draw.choice((0.7, 1.0)),
        launch_s=draw.choice((0.0, 1e-5)),
    )
    anatomy = llama_like(Shape(num_layers=num_layers), seq_len=batch.seq_len)
    return Request(spec=spec, anatomy=anatomy, batch=batch, clips=draw.random() < 0.5)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("seed", "num_micro_batches", "policies"),
    [
        (1, 1, EXTREMES),
        *(pytest.param(*case, EXTREMES, marks=pytest.mark.parity) for case in ((0, 1), (2, 2))),
    ],
)
def test_nothing_coarse_that_fits_is_faster(
    seed: int, num_micro_batches: int, policies: tuple[str, ...]
) -> None:
    check(random_request(seed, 3, num_micro_batches), policies=policies, coarsely=True)


@pytest.mark.parity
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_coarse_that_fits_is_faster_with_3_layers(seed: int, num_micro_batches: int) -> None:
    check(random_request(seed, 3, num_micro_batches), coarsely=True)


@pytest.mark.parity
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_coarse_that_fits_is_faster_with_4_layers(seed: int, num_micro_batches: int) -> None:
    check(random_request(seed, 4, num_micro_batches), policies=EXTREMES, coarsely=True)


def test_nothing_is_found_where_nothing_fits() -> None:
    anatomy = llama_like(Shape(num_layers=2))
    batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=1)
    assert search(Request(spec=machine(device_bytes=1 << 20), anatomy=anatomy, batch=batch)) is None


def test_what_is_given_is_kept() -> None:
    request = request_for("fast link", 2, "four", clips=True)
    fixed: dict[str, Any] = {"num_slots": 2, "activations": ("offload", "offload"), "lockstep": 3}
    fixed |= {"resident_layers": 1, "boundaries": "host", "fragments": False, "num_gradient_buffers": 3}
    given = Request(spec=request.spec, anatomy=request.anatomy, batch=request.batch, choice=Choice(**fixed))
    found = search(given)
    assert found is not None
    assert {name: getattr(found.choice, name) for name in fixed} == fixed


def large_request(num_layers: int) -> Request:
    shape = Shape(num_layers=num_layers, hidden=4096, inner=14336, vocab=128256)
    spec = machine(
        device_bytes=80 << 30, host_bytes=1 << 41, flops=6e14, link=5e10, update_rate=1e10, both_share=0.9
    )
    batch = StepBatch(micro_batch_size=1, seq_len=4096, num_micro_batches=32)
    return Request(spec=spec, anatomy=llama_like(shape, seq_len=4096), batch=batch)


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each choice that is looked at or timed costs of the budget."""
    seen: list[int] = []

    class Watched(Step):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            seen.append(len(self.anatomy.layers))

        def tasks(self, *, is_short: bool = False) -> tuple[list[Task], list[int]]:
            found = super().tasks(is_short=is_short)
            seen.append(len(found[0]))
            return found

    monkeypatch.setattr(request_module, "Step", Watched)
    return seen


@pytest.mark.parametrize("num_layers", [8, pytest.param(180, marks=pytest.mark.parity)])
def test_a_search_ends_when_its_budget_does(num_layers: int, spent: list[int]) -> None:
    found = search(large_request(num_layers), budget=9_000)
    assert found is not None
    assert found.is_cut_short
    passes = 2  # sums on the device, and on the host
    assert passes * 9_000 <= sum(spent) < passes * (9_000 + max(spent))


def test_a_search_that_comes_to_its_end_says_so(spent: list[int]) -> None:
    request = request_for("slow link", 1, "one", clips=True)
    found = search(request, budget=10**9)
    assert found is not None
    assert not found.is_cut_short
    needed = sum(spent)
    again = search(request, budget=needed + 1)
    assert again is not None
    assert (again.choice, again.is_cut_short) == (found.choice, False)
    shorter = search(request, budget=needed // 2)
    assert shorter is not None
    assert shorter.is_cut_short


def test_a_slow_machine_makes_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks that move by a minute whenever they are read, and with nothing known from before.

    Then for a request that comes second, and finds what the first has counted.
    """
    request = large_request(8)
    quiet = make_plan(request, budget=5_000)
    assert quiet.is_cut_short, "the budget is what ends it"
    second = make_plan(request, budget=5_000)
    for clock in ("thread_time", "process_time", "perf_counter", "monotonic", "time"):
        monkeypatch.setattr(time, clock, itertools.count(step=60.0).__next__)
    busy = make_plan(large_request(8), budget=5_000)
    for again in (second, busy):
        found = (again.choice, again.step_s, again.num_evaluated)
        assert found == (quiet.choice, quiet.step_s, quiet.num_evaluated)
    assert busy.plan_s > quiet.plan_s


def test_a_similar_choice_is_tried_first_and_ends_a_search_that_asks_no_more() -> None:
    """What is fast enough is found without a search; where more is wanted, nothing is lost by a start."""
    asked = request_for("nothing in excess", 6, "four", clips=True)
    found = search(asked)
    assert found is not None
    similar = replace(asked, spec=replace(asked.spec, device_bytes=55 << 20), start=found.choice)
    enough = search(similar, enough_s=1.5 * found.step.step_s)
    assert enough is not None
    assert enough.num_timed < found.num_timed / 2
    assert enough.step.step_s <= 1.5 * found.step.step_s
    assert overflow(similar, enough.choice) == {}
    best, without = search(similar), search(replace(similar, start=None, clips=asked.clips))
    assert best is not None
    assert without is not None
    assert best.step.step_s <= without.step.step_s * 1.001


def test_what_was_searched_for_lately_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it begins with, as the same is asked; with another budget it is another question."""
    asked = request_for("slow link", 5, "three", clips=False)
    found = search(asked)
    monkeypatch.setattr(search_module, "_searched", lambda *given: given)
    assert search(replace(asked, start=Choice(num_slots=1).with_defaults(5))) is found
    assert search(asked, budget=10) == (asked, 10, 0.0)
