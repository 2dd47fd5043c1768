"""Plans in which the device's memory adds to the host's: what is resident is in no other place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.config.choice import Choice, StepBatch
from megatrain.hardware import Drives
from megatrain.plan.search.choices import on_device_alone
from megatrain.plan.search.least_memory import enough_ram
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request, overflow, pools_of
from megatrain.plan.search.sizes import MEMORY_SIZES
from megatrain.plan.search.verdict import judge
from tests.plan.anatomies import Shape, llama_like, machine

BATCH = StepBatch(micro_batch_size=2, seq_len=1024, num_micro_batches=4)
DEVICE = 140 << 20


def request(ram: int, num_ranks: int = 1, **changes: Any) -> Request:
    """Make a request of a model of 16 bytes per parameter, on devices that hold some of its blocks."""
    spec = machine(device_bytes=DEVICE, drives=changes.pop("drives", None))
    anatomy = llama_like(Shape(num_layers=6), micro_batch_size=2, seq_len=1024)
    batch = replace(BATCH, num_micro_batches=4 // num_ranks, num_ranks=num_ranks)
    return Request(spec=spec, anatomy=anatomy, batch=batch, host_limit=ram, **changes)


def state_bytes(asked: Request) -> int:
    """Return the bytes of weights, remainders and moments."""
    sizes = [part.sizes for layer in asked.anatomy.layers for part in layer.fragments]
    sizes += [part.sizes for part in asked.anatomy.outer]
    return sum(s.working_bytes + s.remainder_bytes + s.optimizer_bytes(asked.optimizer) for s in sizes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_that_ram_does_not_hold_is_on_the_device_too(num_ranks: int) -> None:
    """Several ranks have all weights on each device, and of the rest room for the largest share."""
    ample = request(1 << 30, num_ranks)
    assert make_plan(ample, budget=1_000).choice.mirror_resident, "a copy at home, where there is room"
    ram = int(0.7 * state_bytes(ample))
    asked = request(ram, num_ranks)
    plan = make_plan(asked)
    assert plan.fits
    assert plan.choice.has_state_on_device
    assert plan.tier_bytes("ram") <= ram
    verdict = judge(asked, plan, tokens=1)
    assert "on the device alone, so a device that is lost costs what is since the" in verdict.sentence
    assert verdict.json()["on_device_alone"]
    at_home = {pool.name: pool.nbytes for pool in plan.pools if pool.tier == "ram"}
    there = {pool.name: pool.nbytes for pool in plan.pools if pool.tier == "device"}
    planes = sum(at_home[name] for name in ("working", "remainder", "exp_avg", "exp_avg_sq"))
    resident = num_ranks * there["resident optimizer state"] + there["resident weights"]
    assert planes + resident == pytest.approx(state_bytes(ample), rel=0.08), "each block in one place"
    mirrored = replace(plan.choice, mirror_resident=True)
    assert overflow(ample, mirrored) == {}
    assert set(overflow(asked, mirrored)) == {"ram"}


def test_the_user_may_refuse_and_may_want_it() -> None:
    ram = int(0.7 * state_bytes(request(1)))
    assert not make_plan(request(ram, choice=Choice(mirror_resident=True)), budget=1_000).fits
    asked = request(1 << 30, choice=Choice(mirror_resident=False, resident_layers=3))
    plan = make_plan(asked, budget=1_000)
    assert plan.fits
    assert plan.choice.has_state_on_device
    more = {pool.name for pool in pools_of(asked, plan.choice)} - {
        pool.name for pool in pools_of(asked, replace(plan.choice, mirror_resident=True))
    }
    assert more == {"state read from the device"}


def test_slow_drives_are_spared() -> None:
    """And fast ones taken, if a step is faster with them."""
    ram = int(0.7 * state_bytes(request(1)))
    slow = Drives(nbytes=1 << 40, read_bytes_per_s=1e7, write_bytes_per_s=1e7)
    assert make_plan(request(ram, drives=slow)).choice.has_state_on_device
    assert on_device_alone(request(ram, drives=slow, commit_every=1)) == []


def test_what_does_not_fit_names_the_least_ram_beside_this_device() -> None:
    tight = replace(request(1), host_limit=None, spec=machine(device_bytes=DEVICE, host_bytes=545 << 20))
    plan = make_plan(tight)
    assert not plan.fits
    enough = enough_ram(tight)
    assert enough is not None
    below = MEMORY_SIZES[MEMORY_SIZES.index(enough) - 1]
    limits = [replace(tight, spec=tight.spec.with_ram(size.nbytes)).limits["ram"] for size in (below, enough)]
    assert limits[0] is not None
    assert limits[1] is not None
    assert limits[0] < plan.tier_bytes("ram") <= limits[1]
    assert plan.tier_bytes("ram") < state_bytes(tight)
    assert make_plan(replace(tight, spec=tight.spec.with_ram(enough.nbytes)), budget=1).fits
