"""An engine that goes on in another way between two steps: the same bits, and the memory of a new one."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.choice import Choice
from megatrain.config.policies import POLICY_NAMES
from megatrain.errors import CapacityError, ConfigError, ModelError
from megatrain.store.placement import Tiers
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from tests.families import FAMILIES
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.execute.test_updates import assert_same_planes, planes_of
from tests.stream.runs import HYPER, assert_same_gradients, start

NUM_STEPS = 6
PLAIN = Choice().with_defaults(4)


def random_choice(chance: random.Random, *, fragments: bool = False, clips: bool = True) -> Choice:
    """Draw a choice for a model of four layers."""
    width = 3 if fragments else 1
    lockstep = chance.choice((1, 2, 3))
    updates = chance.choice(("deferred", "serial") if clips else ("deferred", "immediate", "serial"))
    return Choice(
        num_slots=chance.randint(width, width + 2),
        num_gradient_buffers=chance.randint(width if lockstep > 1 else 1, width + 1),
        activations=tuple(chance.choice(POLICY_NAMES) for _ in range(4)),
        boundaries=chance.choice(("device", "host")),
        fragments=fragments,
        resident_layers=chance.choice((0, 0, 1, 2, 4)),
        outer_resident=chance.random() < 0.5,
        lockstep=lockstep,
        updates=updates,
        gradients=tuple(
            "host" if updates == "immediate" else chance.choice(("host", "device")) for _ in range(4)
        ),
    ).with_defaults(4)


def attach(
    choice: Choice, device: Any = "cpu", *, precision: str = "fp32", family: str = "llama_tied"
) -> Engine:
    engine = attach_plainly(
        make_model(FAMILIES[family]()), device=device, precision=precision, choice=choice, num_micro_batches=3
    )
    engine.arrangement.offloaded._min_bytes = 1  # tiny tensors too
    return engine


def one_step(engine: Engine, optimizer: Any, step: int) -> tuple[Tensor, float]:
    loss = engine.forward_backward(
        make_batches(3, seed=step), seeds=[10 * step, 10 * step + 1, 10 * step + 2]
    )
    return loss, optimizer.step().grad_norm


@lru_cache(maxsize=8)
def fixed_run(
    precision: str, clip: float | None, fragments: bool, family: str
) -> tuple[list[tuple[Tensor, float]], dict[str, Tensor]]:
    """Train with one choice all the way; returns losses and norms, and the state after all steps."""
    choice = replace(PLAIN, num_slots=4, fragments=fragments)
    engine = attach(choice, precision=precision, family=family)
    optimizer = engine.adamw(**HYPER, max_grad_norm=clip)
    steps = [one_step(engine, optimizer, step) for step in range(NUM_STEPS)]
    return steps, planes_of(engine)


def device_of(name: str, seed: int) -> Any:
    machine = EmulatedMachine(seed=seed, jitter_s=2e-4, host_bytes_per_s=1e8)
    return EmulatedLanes(machine) if name == "emulated" else name


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("device", "seed", "precision", "clip", "fragments", "family"),
    [
        ("checked", 0, "fp32", 0.5, False, "llama_tied"),
        ("cpu", 6, "fp32", None, False, "qwen3_moe"),
        pytest.param("checked", 3, "fp32", None, True, "llama_tied", marks=pytest.mark.parity),
        pytest.param("emulated", 7, "fp32", 0.5, False, "llama_tied", marks=pytest.mark.parity),
        ("emulated", 9, "bf16", 0.5, True, "llama_tied"),
        *(
            pytest.param(device, seed, precision, clip, fragments, family, marks=pytest.mark.parity)
            for seed, device in enumerate(("checked", "emulated") * 5, 100)
            for precision in ("fp32", "bf16")
            for clip in (0.5, None)
            for fragments in (False, True)
            for family in ("llama_tied", "qwen3_moe")
        ),
    ],
)
def test_random_changes_change_no_bit(
    device: str, seed: int, precision: str, clip: float | None, fragments: bool, family: str
) -> None:
    """Another choice before each step; the loss, the norm and every plane are those of a run with one."""
    expected, planes = fixed_run(precision, clip, fragments, family)
    chance = random.Random(seed)
    choices = [random_choice(chance, fragments=fragments, clips=clip is not None) for _ in range(NUM_STEPS)]
    engine = attach(choices[0], device_of(device, seed), precision=precision, family=family)
    optimizer = engine.adamw(**HYPER, max_grad_norm=clip)
    for step, choice in enumerate(choices):
        if step:
            engine.reconfigure(choice)
        assert engine.choice == choice
        loss, norm = one_step(engine, optimizer, step)
        assert_same_bits(loss, expected[step][0], f"loss of step {step} under {choice}")
        assert norm == expected[step][1], f"step {step} under {choice}"
    assert_same_planes(engine, planes)
    engine.detach()


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.parity)])
def test_memory_afterwards_is_that_of_a_new_engine(precision: str) -> None:
    """Every pool of the device and every plane of the host, after each of five changes and a step."""
    chance = random.Random(11)
    engine = attach(PLAIN, precision=precision)
    optimizer = engine.adamw(**HYPER, max_grad_norm=None)
    for step in range(5):
        choice = random_choice(chance, clips=False)
        engine.reconfigure(choice)
        fresh = attach(choice, precision=precision)
        other = fresh.adamw(**HYPER, max_grad_norm=None)
        assert engine.lanes.device_bytes == fresh.lanes.device_bytes
        one_step(engine, optimizer, step)
        one_step(fresh, other, step)
        assert engine.lanes.device_bytes == fresh.lanes.device_bytes
        assert engine.arrangement.offloaded.host_bytes == fresh.arrangement.offloaded.host_bytes
        planes = {plane: arena.nbytes for plane, arena in fresh.host.planes.arenas.items()}
        assert {plane: arena.nbytes for plane, arena in engine.host.planes.arenas.items()} == planes


def test_gradients_after_a_change_are_those_of_the_resident_model() -> None:
    _, reference, engine, optimizer = start("llama_tied", resident_layers=2)
    for step, residents in enumerate((4, 0, 1)):
        engine.reconfigure(replace(engine.choice, resident_layers=residents, lockstep=2))
        batches = make_batches(2, seed=step)
        assert_same_bits(engine.forward_backward(batches), reference.forward_backward(batches), "loss")
        assert_same_gradients(engine, reference.sums)
        reference.step(optimizer.step().grad_norm, 0.5)


def test_a_change_before_the_optimizer_is_made() -> None:
    engine = attach(PLAIN, "checked")
    engine.reconfigure(replace(PLAIN, updates="serial", resident_layers=1))
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert optimizer.updates.value == engine.choice.updates == engine.choice.updates == "serial"
    expected, _ = fixed_run("fp32", 0.5, False, "llama_tied")
    for step in range(2):
        loss, norm = one_step(engine, optimizer, step)
        assert_same_bits(loss, expected[step][0], f"loss of step {step}")
        assert norm == expected[step][1]


def test_counts_and_reports_go_on() -> None:
    """A step is reported as it was arranged, though it is read when the engine is arranged otherwise."""
    engine = attach(PLAIN, "checked")
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    one_step(engine, optimizer, 0)
    expected = engine.last_step
    one_step(engine, optimizer, 1)
    fetched = engine.counts.fetch_bytes
    engine.reconfigure(replace(PLAIN, activations=("keep",) * 4, resident_layers=4, outer_resident=True))
    report = engine.last_step
    assert report.hardware_flops == expected.hardware_flops > report.model_flops
    assert (report.fetch_bytes, report.offload_bytes) == (expected.fetch_bytes, expected.offload_bytes)
    one_step(engine, optimizer, 2)
    assert engine.counts.fetch_bytes == fetched
    assert engine.last_step.fetch_bytes == 0
    assert engine.last_step.hardware_flops == report.model_flops


def test_an_evaluation_between_steps_does_not_stand_in_the_way() -> None:
    engine = attach(PLAIN, "checked")
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    (batch,) = make_batches(1)
    with torch.no_grad():
        before = engine.model(**batch).loss
        engine.reconfigure(replace(PLAIN, num_slots=3, resident_layers=2))
        assert_same_bits(engine.model(**batch).loss, before, "loss")
    one_step(engine, optimizer, 0)


@pytest.mark.parametrize("what", ["a forward", "gradients", "a block"])
def test_a_change_inside_a_step_is_refused(what: str) -> None:
    engine = attach(PLAIN, "checked")
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    (batch,) = make_batches(1)
    other = replace(PLAIN, num_slots=3)
    message = (
        r"for the time between two steps: finish the backward, then call opt\.step\(\) or opt\.zero_grad"
    )
    if what == "a block":
        handle = engine.arrangement.layer_modules[1].register_forward_pre_hook(
            lambda *_: engine.reconfigure(other)
        )
        with pytest.raises(ConfigError, match=message):
            engine.forward_backward([batch])
        handle.remove()
    else:
        loss = engine.model(**batch).loss
        if what == "gradients":
            loss.backward()
        with pytest.raises(ConfigError, match=message):
            engine.reconfigure(other)
        if what == "a forward":
            loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    engine.reconfigure(other)
    assert engine.choice == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fragments": True}, "fragments is True, but the state is laid out for fragments=False; detach"),
        ({"head_chunk_tokens": 8}, "head_chunk_tokens is 8, and was None: the loss would be rounded"),
        ({"updates": "immediate"}, r"updates=immediate cannot clip \(max_grad_norm is 0.5\)"),
        ({"updates": "later"}, "updates is 'later'; use deferred, immediate, serial or auto"),
        ({"num_slots": 0}, "num_slots is 0; use 1 or more"),
        ({"lockstep": 0}, "lockstep is 0; use 1 or more"),
        ({"activations": ("keep",) * 3}, "activations names 3 policies for 4 layers"),
        ({"activations": ("keep",) * 3 + ("drop",)}, "activations is 'drop'; use keep"),
        ({"resident_layers": 5}, "is 5, but the model has 4 layers"),
        ({"boundaries": "disk"}, "boundaries is 'disk'; use device, host, nvme or auto"),
        ({"boundaries": "nvme"}, "boundaries is nvme, but there are no drives"),
        (
            {"tiers": frozenset({("moments", "nvme")})},
            r"puts a part of the state on drives \(tiers\), where nothing of it is; detach",
        ),
    ],
)
def test_a_choice_that_cannot_be_obeyed_is_refused(changes: dict[str, Any], message: str) -> None:
    engine = attach(PLAIN, "checked")
    engine.adamw(**HYPER, max_grad_norm=0.5)
    executor = engine.executor
    with pytest.raises(ConfigError, match=message):
        engine.reconfigure(replace(PLAIN, **changes))
    assert engine.executor is executor
    assert engine.choice == PLAIN


def test_compiled_layers_cannot_show_single_operations() -> None:
    engine = attach_plainly(make_model(FAMILIES["llama"]()), compile="on")
    with pytest.raises(ConfigError, match="recompute_cheap keeps the results of matrix products"):
        engine.reconfigure(replace(engine.choice, activations=("recompute_cheap",) * 4))


def test_a_choice_that_does_not_fit_changes_nothing() -> None:
    """What the old arrangement holds counts as free; what does not fit then is refused before it is freed."""
    limit = attach(replace(PLAIN, num_slots=3)).lanes.device_bytes + 60_000
    engine = attach(PLAIN, EmulatedLanes(EmulatedMachine(device_bytes=limit)))
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    expected, _ = fixed_run("fp32", 0.5, False, "llama_tied")
    for step, residents in enumerate((0, 4, 0)):
        if residents:
            with pytest.raises(CapacityError, match="device memory"):
                engine.reconfigure(replace(PLAIN, resident_layers=4, outer_resident=True))
        else:
            engine.reconfigure(replace(PLAIN, num_slots=3))
        loss, norm = one_step(engine, optimizer, step)
        assert_same_bits(loss, expected[step][0], f"loss of step {step}")
        assert norm == expected[step][1]
    engine.detach()


def test_an_allocation_that_fails_brings_the_old_arrangement_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = attach(replace(PLAIN, resident_layers=1), "checked")
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    expected, _ = fixed_run("fp32", 0.5, False, "llama_tied")
    one_step(engine, optimizer, 0)
    allocate, held = engine.lanes.allocate, engine.lanes.device_bytes
    countdown = [5]

    def fail(nbytes: int) -> Tensor:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise torch.OutOfMemoryError("no memory")
        return allocate(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(engine.lanes, "allocate", fail)
        with pytest.raises(torch.OutOfMemoryError):
            engine.reconfigure(replace(PLAIN, num_slots=3))
    assert engine.choice.resident_layers == 1
    for step in range(1, 3):
        loss, norm = one_step(engine, optimizer, step)
        assert_same_bits(loss, expected[step][0], f"loss of step {step}")
        assert norm == expected[step][1]
    assert engine.lanes.device_bytes == held


def tiered(
    tmp_path: Path, device: Any = "checked", choice: Choice = PLAIN, ram: int | None = 500_000
) -> tuple[Engine, Any]:
    """Attach a model with a drive: its whole state is there, as far as it can be, or with `ram=None` none."""
    model = make_model(FAMILIES["llama_tied"]())
    tiers = Tiers(nvme=(tmp_path / "drive",), ram=ram)
    engine = attach_plainly(model, device=device, precision="bf16", choice=choice, tiers=tiers)
    engine.arrangement.offloaded._min_bytes = 1
    return engine, engine.adamw(**HYPER, max_grad_norm=0.5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", ["checked", "emulated"])
def test_an_engine_with_state_on_drives_changes_too(device: str, tmp_path: Path) -> None:
    expected, planes = fixed_run("bf16", 0.5, False, "llama_tied")
    choice = replace(PLAIN, lockstep=3, num_gradient_buffers=2)
    engine, optimizer = tiered(tmp_path, device_of(device, 3), choice)
    assert engine.choice.tier("moments") == "nvme"
    for step in range(NUM_STEPS):
        if step:
            places = (("host",) * 4, ("device",) * 4, ("device", "host", "nvme", "nvme"), ("nvme",) * 4)
            changed = replace(engine.choice, num_slots=2 + step % 2, gradients=places[step % 4])
            engine.reconfigure(replace(changed, updates=("deferred", "serial")[step % 3 == 0]))
        loss, norm = one_step(engine, optimizer, step)
        assert_same_bits(loss, expected[step][0], f"loss of step {step}")
        assert norm == expected[step][1]
    masters = dict(engine.named_masters())
    other = attach(choice, precision="bf16")
    other_optimizer = other.adamw(**HYPER, max_grad_norm=0.5)
    for step in range(NUM_STEPS):
        one_step(other, other_optimizer, step)
    assert planes_of(other).keys() == planes.keys()
    for name, master in other.named_masters():
        assert_same_bits(masters[name], master, name)
    engine.detach()


def test_planes_on_drives_of_which_ram_holds_every_block_are_in_ram(tmp_path: Path) -> None:
    """A plan of a run that commits names the planes; what fits in RAM is there, and stays there."""
    engine, optimizer = tiered(tmp_path, ram=None)
    assert engine.choice.tiers == frozenset()
    num_blocks = len(engine.arrangement.binding.blocks)
    planes = frozenset({("remainder", "nvme"), ("moments", "nvme")})
    engine.reconfigure(replace(engine.choice, num_slots=3, tiers=planes, blocks_in_ram=num_blocks))
    assert (engine.choice.num_slots, engine.choice.tiers) == (3, frozenset())
    expected, _ = fixed_run("bf16", 0.5, False, "llama_tied")
    assert_same_bits(one_step(engine, optimizer, 0)[0], expected[0][0], "loss")
    with pytest.raises(ConfigError, match="puts a part of the state on drives"):
        engine.reconfigure(replace(engine.choice, tiers=planes, blocks_in_ram=num_blocks - 1))
    engine.detach()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resident_layers": 1}, "blocks cannot become resident: the state is on drives"),
        ({"tiers": frozenset()}, r"puts nothing of the state on drives \(tiers\), where a part of it is"),
    ],
)
def test_what_drives_do_not_allow_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    engine, _ = tiered(tmp_path)
    with pytest.raises(ConfigError, match=message):
        engine.reconfigure(replace(engine.choice, **changes))
    engine.detach()


def test_a_detached_engine_is_not_changed() -> None:
    engine = attach(PLAIN)
    engine.detach()
    with pytest.raises(ModelError, match="the engine was detached"):
        engine.reconfigure(PLAIN)
