"""A step's tasks and its sums agree: bounds add up what the program moves, and none is above the time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatrain.config.choice import GRADIENTS, Choice, StepBatch
from megatrain.config.policies import POLICIES, POLICY_NAMES
from megatrain.config.runs import Runs, StepSums
from megatrain.hardware import Drives
from megatrain.layout.block_bytes import BlockBytes
from megatrain.model.profile.anatomy import Anatomy, LateBytes
from megatrain.plan.cost.rates import Rates
from megatrain.plan.cost.step_time import Step
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.program.kinds import Lane
from tests.plan.anatomies import Shape, llama_like, machine

LAYERS = 4
RATES = Rates(machine(), "bf16")
ANATOMY = llama_like(Shape(num_layers=LAYERS))
SLOW_DRIVES = Drives(nbytes=1 << 40, read_bytes_per_s=6e7, write_bytes_per_s=4e7)
PLAIN = Choice(num_gradient_buffers=2).with_defaults(LAYERS)

CHOICES = {
    "plain": PLAIN,
    "one slot": replace(PLAIN, num_slots=1),
    "all slots": replace(PLAIN, num_slots=LAYERS),
    "resident": replace(PLAIN, resident_layers=2, outer_resident=True),
    "immediate": replace(PLAIN, updates="immediate"),
    "kept": replace(PLAIN, activations=("keep",) * LAYERS),
}


def moved(step: Step, lane: Lane, kinds: tuple[str, ...]) -> float:
    """Return the bytes that tasks of a lane move, from their seconds."""
    tasks, _ = step.tasks()
    rate = step.rates.spec.h2d_bytes_per_s if lane is Lane.FETCH else step.rates.spec.d2h_bytes_per_s
    return sum(task.seconds for task in tasks if task.lane is lane and task.kind in kinds) * rate


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CHOICES)
def test_bytes_of_the_bounds_are_those_of_the_program(name: str, count: int) -> None:
    choice = replace(CHOICES[name], lockstep=1)
    batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=count)
    step = Step(RATES, ANATOMY, choice, batch)
    fetched, offloaded = BlockSums.of(ANATOMY, choice).moved_bytes(
        choice, StepSums.of(Runs.of(1, count), choice.lockstep)
    )
    assert moved(step, Lane.FETCH, ("fetch", "load")) == pytest.approx(fetched, rel=1e-6)
    assert moved(step, Lane.OFFLOAD, ("offload",)) == pytest.approx(offloaded, rel=1e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_bytes_of_the_bounds_are_no_more_than_those_of_a_program_in_fragments(count: int) -> None:
    """Where a backward begins with other fragments than its forward has left, the program fetches more."""
    choice = replace(PLAIN, fragments=True, num_slots=3, num_gradient_buffers=3)
    batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=count)
    step = Step(RATES, ANATOMY, choice, batch)
    fetched, offloaded = BlockSums.of(ANATOMY, choice).moved_bytes(
        choice, StepSums.of(Runs.of(1, count), choice.lockstep)
    )
    assert 1.0 <= moved(step, Lane.FETCH, ("fetch", "load")) / fetched < 1.15
    assert moved(step, Lane.OFFLOAD, ("offload",)) == pytest.approx(offloaded, rel=1e-6)


def test_updates_are_of_every_parameter_that_the_host_keeps() -> None:
    batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=1)
    for choice in CHOICES.values():
        step = Step(RATES, ANATOMY, choice, batch)
        tasks, _ = step.tasks()
        seconds = sum(task.seconds for task in tasks if task.lane is Lane.HOST)
        nbytes = step.block_sums.residency(choice).on_host.total(BlockBytes.update_bytes, RATES.optimizer)
        assert seconds == pytest.approx(RATES.update_s(nbytes))


def random_choice(chance: random.Random, count: int, policies: Sequence[str] = POLICY_NAMES) -> Choice:
    fragments = chance.random() < 0.5
    parts = 2 if fragments else 1
    lockstep = chance.randint(1, count)
    updates = chance.choice(["deferred", "immediate", "serial"])
    waits = updates == "deferred" and lockstep == count and chance.random() < 0.5
    sums = "host" if not waits and chance.random() < 0.5 else "device"
    return Choice(
        num_slots=chance.randint(parts, LAYERS * parts),
        num_gradient_buffers=chance.randint(parts, parts + 2),
        activations=tuple(chance.choice(policies) for _ in range(LAYERS)),
        boundaries=chance.choice(["device", "host"]),
        fragments=fragments,
        resident_layers=chance.randint(0, LAYERS),
        outer_resident=chance.random() < 0.5,
        lockstep=lockstep,
        updates=updates,
        gradients=("device" if waits else "host",) * LAYERS,
        sums=sums,
    ).with_defaults(LAYERS)


@pytest.mark.parametrize("seed", range(4))
def test_no_bound_is_above_the_time(seed: int) -> None:
    """A choice is passed over when its bound is above the best time: a bound that is too high loses it."""
    chance, places = random.Random(seed), random.Random(seed)
    for _ in range(60):
        count = chance.randint(1, 4)
        batch = StepBatch(
            micro_batch_size=1, seq_len=1024, num_micro_batches=count, num_passes_before=count % 3
        )
        spec = machine(
            link=chance.choice([2e8, 2e9, 1e11]),
            update_rate=chance.choice([2e6, 1e8, 1e10]),
            both_share=chance.choice([0.6, 1.0]),
            host_rate=chance.choice([1e9, 1e11, 1e15]),
            flops=1e12,
            drives=places.choice([SLOW_DRIVES, replace(SLOW_DRIVES, is_duplex=True)]),
        )
        choice = random_choice(chance, count)
        if "device" in choice.gradients:
            mixed = tuple(places.choice(GRADIENTS) for _ in range(LAYERS))
            choice = replace(choice, gradients=mixed)
        step = Step(Rates(spec, "bf16"), ANATOMY, choice, batch)
        # activations of one round may leave while another's come back: that bound is for one round only
        bounds = {name: s for name, s in step.bounds_s.items() if not name.startswith("activations")}
        assert step.step_s >= 0.999 * max(bounds.values()), (choice, batch, bounds, step.step_s)


def test_a_faster_machine_is_never_slower() -> None:
    chance = random.Random(7)
    for _ in range(30):
        batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=3)
        choice = random_choice(chance, 3)
        slow = Step(Rates(machine(), "bf16"), ANATOMY, choice, batch)
        fast = Step(Rates(machine(flops=2e12, link=2e9, update_rate=2e8), "bf16"), ANATOMY, choice, batch)
        assert fast.step_s <= 1.001 * slow.step_s


def test_a_host_that_computes_does_one_thing_after_the_other() -> None:
    spec = machine(device="cpu", device_bytes=None)
    batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=2)
    step = Step(Rates(spec, "bf16"), ANATOMY, PLAIN, batch)
    (bound,) = step.bounds_s.values()
    assert step.step_s == pytest.approx(bound, rel=0.02)


@pytest.mark.parametrize("dropped", [(0, 1, 2, 3), (1, 2), (2, 3), (3,)])
def test_forwards_again_are_those_of_the_layers_before(dropped: tuple[int, ...]) -> None:
    """Where layers are unlike, as the first ones of many mixtures of experts are."""
    layers = tuple(
        replace(layer, forward=replace(layer.forward, matmul_flops=layer.forward.matmul_flops * (1 + n)))
        for n, layer in enumerate(ANATOMY.layers)
    )
    activations = tuple("drop_boundary" if n in dropped else "recompute" for n in range(LAYERS))
    batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=1, num_passes_before=2)
    choice = replace(PLAIN, activations=activations)
    step = Step(Rates(machine(), "bf16"), replace(ANATOMY, layers=layers), choice, batch)
    computing = ("forward", "backward", "head", "head backward")
    listed = sum(task.seconds for task in step.tasks()[0] if task.kind in computing)
    assert step.compute_s - step.costs.step_s == pytest.approx(listed, rel=1e-9)


def test_what_runs_again_in_part_costs_less_than_the_whole_in_parts_too() -> None:
    batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=2)
    for fragments in (False, True):
        frame = replace(PLAIN, fragments=fragments, num_slots=3, num_gradient_buffers=3)
        steps = {
            name: Step(RATES, ANATOMY, replace(frame, activations=(name,) * LAYERS), batch)
            for name in ("recompute", "recompute_cheap", "keep")
        }
        whole, cheap, kept = (
            sum(task.seconds for task in step.tasks()[0] if task.kind in ("forward", "backward"))
            for step in steps.values()
        )
        assert kept < cheap < whole


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.parity) for seed in (1, 2))])
def test_the_short_program_takes_the_time_of_the_whole_one(seed: int) -> None:
    """Rounds that go on alike, and micro-batches that pass together, cost what they cost one by one.

    Together they move the same bytes and compute the same; what differs is how finely copies and visits
    alternate, which is at most a visit's time in each round.
    """
    whole = [name for name, policy in POLICIES.items() if not policy.refines]
    for choice, whole_s, short_s in both_times(seed, whole):
        is_whole = choice.lockstep <= 4  # rounds that go on alike are exact
        assert short_s == pytest.approx(whole_s, rel=1e-9 if is_whole else 0.04), choice


def test_the_short_program_is_nearly_right_under_every_policy() -> None:
    """Of 288 choices drawn so, two whose rounds go on alike differ, by 0.1 and 1.2 %."""
    for choice, whole_s, short_s in both_times(0, POLICY_NAMES):
        assert short_s == pytest.approx(whole_s, rel=0.02 if choice.lockstep <= 4 else 0.04), choice


def both_times(seed: int, policies: Sequence[str]) -> Iterator[tuple[Choice, float, float]]:
    """Yield random choices, with the times of their whole program and of the short one."""
    chance = random.Random(seed)
    for _ in range(12):
        count = chance.randint(4, 16)
        batch = StepBatch(
            micro_batch_size=1, seq_len=1024, num_micro_batches=count, num_passes_before=count % 3
        )
        choice = random_choice(chance, count, policies)
        spec = machine(link=chance.choice([2e8, 2e9, 1e11]), update_rate=chance.choice([1e8, 1e10]))
        step = Step(Rates(spec, "bf16"), ANATOMY, choice, batch)
        moved = {kind: step.program().nbytes(kind) for kind in step.moved_bytes}
        assert step.moved_bytes == moved, (choice, batch)
        yield choice, step.timed(is_short=False), step.step_s


@pytest.mark.parametrize("count", [1, 3])
def test_a_last_layer_that_comes_back_late_takes_no_time_that_its_program_does_not(count: int) -> None:
    """In tiles it leaves the device too, but its copies are in no program, and so in no bound."""
    late = LateBytes(
        left_bytes=0, forward_peak_bytes=0, backward_peak_bytes=0, fragment_peak_bytes=0, collect_bytes=(0,)
    )
    layers = tuple(replace(layer, late=dict.fromkeys(POLICIES, late)) for layer in ANATOMY.layers)
    choice = replace(PLAIN, activations=("recompute",) * LAYERS, boundaries="host", lockstep=1)
    batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=count)
    rates = Rates(replace(RATES.spec, device="cpu"), "bf16")
    step = Step(rates, replace(ANATOMY, layers=layers), choice, batch)
    assert step.costs.runs[-1].leaving_bytes > 0
    assert moved(step, Lane.SAVE, ("save",)) == pytest.approx(step.sums[3], rel=1e-6)
    assert step.step_s >= (1 - 1e-9) * step.bounds_s["everything in turn"]


@pytest.mark.parametrize("kind", ["cpu", "imagined"])
@pytest.mark.parametrize("num_frozen", [1, 3])
def test_layers_before_the_first_trained_one_have_no_backward_in_the_bounds(
    kind: str, num_frozen: int
) -> None:
    """`train.only` of later layers ended in an assertion: their bound was above their time."""
    anatomy = frozen(ANATOMY, num_frozen)
    spec = machine(flops=1e12, link=2e8, device=kind)
    chance = random.Random(num_frozen)
    for count in (1, 3):
        batch = StepBatch(micro_batch_size=1, seq_len=1024, num_micro_batches=count)
        for _ in range(10):
            choice = replace(random_choice(chance, count), fragments=False, gradients=("host",) * LAYERS)
            step = Step(Rates(spec, "bf16"), anatomy, choice.with_defaults(LAYERS), batch)
            assert step.block_sums.first_trained == num_frozen
            bounds = {name: s for name, s in step.bounds_s.items() if not name.startswith("activations")}
            assert step.step_s >= 0.999 * max(bounds.values()), (choice, bounds, step.step_s)
        step = Step(Rates(spec, "bf16"), anatomy, replace(PLAIN, lockstep=1), batch)
        fetched, _ = step.block_sums.moved_bytes(step.choice, StepSums.of(Runs.of(1, count), 1))
        assert moved(step, Lane.FETCH, ("fetch", "load")) >= fetched * (1 - 1e-6)


def frozen(anatomy: Anatomy, num_layers: int) -> Anatomy:
    """Freeze the first layers, and what is in no layer."""
    layers = tuple(
        replace(layer, fragments=tuple(map(_frozen, layer.fragments))) if number < num_layers else layer
        for number, layer in enumerate(anatomy.layers)
    )
    return replace(anatomy, layers=layers, outer=tuple(map(_frozen, anatomy.outer)))


def _frozen(fragment: Any) -> Any:
    none = dict.fromkeys(("num_split", "num_state", "num_scales"), 0)
    return replace(fragment, sizes=replace(fragment.sizes, **none))
