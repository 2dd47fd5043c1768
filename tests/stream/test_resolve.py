"""Attached with nothing given, a model is planned for, and trains to the bits of a run with all given."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.config.choice import AUTO, Choice, StepBatch
from megatrain.errors import CapacityError, ConfigError, ModelError
from megatrain.plan.search.small_step import LargerStep
from megatrain.store.placement import Tiers
from megatrain.stream.attach import resolve as resolve_module
from megatrain.stream.attach.resolve import Conditions, resolve
from megatrain.stream.job.job import Job
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine, InlineLanes
from tests.families import FAMILIES
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.execute.test_memory import deep_config
from tests.stream.runs import HYPER, assert_same_steps

RECOMPUTE = ("recompute",) * 4
BATCH = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "device", "precision"),
    [("llama_tied", "cpu", "fp32"), ("mixtral", "checked", "fp32"), ("gpt2", "emulated", "bf16")],
)
def test_attached_with_nothing_given_it_is_planned_and_exact(
    family: str, device: str, precision: str
) -> None:
    model = make_model(FAMILIES[family]())
    reference = Resident(model, precision=precision, **HYPER)
    engine = megatrain.attach(model, device=device, precision=precision)
    assert engine.choice.is_resolved
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=3)
    engine.detach()


def test_six_micro_batches_are_not_six_rounds() -> None:
    engine = megatrain.attach(make_model(FAMILIES["llama"]()), device="emulated")
    assert engine.choice.lockstep >= 6
    optimizer = engine.adamw()
    engine.forward_backward(make_batches(6))
    optimizer.step()
    assert engine.last_step.fetches <= 2 * 4
    engine.detach()


def test_what_is_given_is_obeyed() -> None:
    given: dict[str, Any] = {"num_slots": 3, "activations": "keep", "boundaries": "host", "lockstep": 2}
    engine = megatrain.attach(make_model(FAMILIES["llama"]()), device="checked", batch=BATCH, **given)
    expected = {**given, "activations": ("keep",) * 4}
    assert {name: getattr(engine.choice, name) for name in given} == expected
    engine.detach()
    again = megatrain.attach(make_model(FAMILIES["llama"]()), Choice(num_slots=3), lockstep=1, batch=BATCH)
    assert (again.choice.num_slots, again.choice.lockstep) == (3, 1)


def test_whoever_gives_a_small_step_is_told_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resolve_module, "larger_step", lambda *_: LargerStep(factor=16, gain=7.86))
    for batch in (BATCH, None):
        with caplog.at_level(logging.WARNING, logger="megatrain"):
            megatrain.attach(make_model(FAMILIES["llama"]()), batch=batch).detach()
    (told,) = caplog.messages  # nothing where the step is not of the user
    assert told.startswith("a step of 96 tokens is small: what takes longest is ")
    assert told.endswith(
        "; a step of 16 times as many micro-batches (gradient_accumulation_steps of a trainer) makes "
        "training 7.9 times faster"
    )


def test_a_resolved_choice_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "count_model", lambda *_, **__: pytest.fail("it was counted"))
    choice = Choice().with_defaults(4)
    engine = megatrain.attach(make_model(FAMILIES["llama"]()), choice)
    assert engine.choice == choice


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_stays_within_the_device(precision: str) -> None:
    model = make_model(deep_config(6))
    engine = attach_plainly(model, device="checked", precision=precision, resident_layers=6)
    engine.adamw()
    whole = engine.device_bytes_peak
    engine.detach()
    for share in (0.6, 1.0, 2.0):
        lanes = EmulatedLanes(EmulatedMachine(device_bytes=int(share * whole)))
        engine = megatrain.attach(model, device=lanes, precision=precision, batch=BATCH)
        optimizer = engine.adamw(**HYPER)
        engine.forward_backward(make_batches(3))
        optimizer.step()
        engine.sync()
        assert 0 < engine.device_bytes_peak <= share * whole
        engine.detach()


def test_gradients_wait_on_the_device_where_the_host_is_short() -> None:
    model = make_model(deep_config(8))
    numel = sum(parameter.numel() for parameter in model.parameters())
    engine = megatrain.attach(
        model, device="emulated", precision="bf16", batch=BATCH, host_limit=int(13.5 * numel)
    )
    assert "device" in engine.choice.gradients
    assert engine.choice.lockstep == 3, "they wait for the norm of one round"
    engine.detach()


def test_on_a_cpu_nothing_is_resident() -> None:
    engine = megatrain.attach(make_model(FAMILIES["llama"]()), batch=BATCH)
    assert engine.arrangement.residents == frozenset()


def test_what_does_not_fit_is_refused_before_anything_is_taken() -> None:
    model = make_model(FAMILIES["llama"]())
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=20_000))
    with pytest.raises(CapacityError, match=r"device memory: at least .* but the limit is"):
        megatrain.attach(model, device=lanes)
    assert lanes.device_bytes == 0
    assert "_megatrain_host" not in vars(model)
    with pytest.raises(ConfigError, match="these settings exclude each other: num_slots 1, fragments True"):
        megatrain.attach(model, fragments=True, num_slots=1)
    lanes.close()


def test_batches_are_planned_for() -> None:
    """Kept activations of a large batch do not fit where those of a small one do, and what would is said."""
    model = make_model(deep_config(8))
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=50_000_000))
    small, large = (StepBatch(micro_batch_size=rows, seq_len=64, num_micro_batches=1) for rows in (1, 64))
    engine = megatrain.attach(model, device=lanes, batch=small, activations="keep")
    engine.detach()
    with pytest.raises(CapacityError, match=r"device memory: .* use memory\.activations="):
        megatrain.attach(model, device=lanes, batch=large, activations="keep")
    lanes.close()


# -- loaded models -------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fragments", [False, True])
def test_a_loaded_model_stays_as_it_is_laid_out(fragments: bool) -> None:
    model = megatrain.load(config=FAMILIES["llama"](), fragments=fragments)
    host = vars(model)["_megatrain_host"]
    engine = megatrain.attach(model.train(), device="emulated", batch=BATCH)
    assert engine.host is host
    assert engine.choice.fragments is fragments
    engine.detach()


def test_a_state_that_was_loaded_into_ram_keeps_its_places_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that left them out would have the state twice, or, over several nodes, not at all."""
    asked: list[Any] = []
    right = resolve_module.make_plan

    def plan(request: Any, **given: Any) -> Any:
        asked.append(request.choice.mirror_resident)
        return right(request, **given)

    monkeypatch.setattr(resolve_module, "make_plan", plan)
    for model in (make_model(FAMILIES["llama"]()), megatrain.load(config=FAMILIES["llama"]()).train()):
        megatrain.attach(model, device="emulated", batch=BATCH).detach()
    assert asked == [AUTO, True]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", ["emulated", "cpu"])
def test_state_on_drives_stays_where_it_was_loaded(device: str, tmp_path: Path) -> None:
    tiers = Tiers(nvme=(tmp_path / "drive",), ram=3_000_000)
    model = megatrain.load(config=deep_config(4), tiers=tiers)
    placement = vars(model)["_megatrain_host"].on_drives.placement
    engine = megatrain.attach(model.train(), device=device, tiers=tiers, batch=BATCH)
    assert engine.choice.is_resolved
    assert engine.choice.tier("moments") == "nvme"
    num_blocks = len(engine.host.layouts)
    assert num_blocks - engine.choice.blocks_in_ram == len(placement.state_on_drives) > 0
    assert engine.arrangement.residents == frozenset()
    optimizer = engine.adamw()
    engine.forward_backward(make_batches(3))
    optimizer.step()
    engine.close(removes=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loaded", [False, True])
def test_ram_holds_as_many_blocks_as_the_choice_says(loaded: bool, tmp_path: Path) -> None:
    """And no more, though more would fit: the rest of the memory is for something else."""
    tiers = Tiers(nvme=(tmp_path / "drive",))
    planes = frozenset({("remainder", "nvme"), ("moments", "nvme"), ("working", "nvme")})
    chosen = Choice(tiers=planes, blocks_in_ram=1, weights_in_ram=3, fragments=False)
    if loaded:
        model = megatrain.load(None, chosen, config=deep_config(4), tiers=tiers)
    else:
        model = make_model(deep_config(4))
    engine = megatrain.attach(model.train(), chosen, device="emulated", tiers=tiers, batch=BATCH)
    placement = engine.host.on_drives.placement
    num_blocks = len(engine.host.layouts)
    assert num_blocks - len(placement.state_on_drives) == engine.choice.blocks_in_ram == 1
    assert num_blocks - len(placement.working_on_drives) == engine.choice.weights_in_ram == 3
    engine.close(removes=True)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (frozenset({("moments", "nvme")}), r"puts planes on drives \(tiers\), but there are no drives; give"),
        (frozenset({("bogus", "tape")}), r"tiers has \('bogus', 'tape'\); use pairs of a plane \(working, "),
        ({"moments": "nvme"}, r"tiers has \{'moments': 'nvme'\}; use pairs of a plane"),
        ({("moments", "nvme")}, r"tiers has \{\('moments', 'nvme'\)\}; use pairs of a plane"),
        ([("moments", "nvme")], r"tiers has \[\('moments', 'nvme'\)\]; use pairs of a plane"),
    ],
)
def test_a_choice_of_tiers_that_cannot_be_is_refused(tiers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatrain.attach(make_model(deep_config(1)), Choice(tiers=tiers))


def test_tiers_are_of_their_class() -> None:
    wrong: Any = {"ram": "64GiB"}
    message = r"tiers is \{'ram': '64GiB'\}; use megatrain.Tiers\(nvme="
    with pytest.raises(ConfigError, match=message):
        megatrain.load(config=deep_config(1), tiers=wrong)
    with pytest.raises(ConfigError, match=message):
        megatrain.attach(make_model(deep_config(1)), tiers=wrong)


def test_tiers_take_sizes_and_directories_as_text() -> None:
    tiers = Tiers(nvme="/mnt/a", ram="64MiB")  # type: ignore[arg-type]
    assert (tiers.nvme, tiers.ram) == ((Path("/mnt/a"),), 64 << 20)
    with pytest.raises(ConfigError, match="names no directory"):
        Tiers(nvme=())
    with pytest.raises(ConfigError, match=r"Tiers\(ram=\.\.\.\) is -5; use bytes or a size"):
        Tiers(nvme=(Path("/mnt/a"),), ram=-5)


# -- models that cannot be counted ---------------------------------------------------------------------------


def uncountable() -> Any:
    """Make a model whose second layer scales by a value: on tensors without values nobody knows it."""
    model = make_model(FAMILIES["llama"]())
    layer = model.model.layers[1]
    inner = type(layer).forward

    class Scaled(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            scale = 1.0 if hidden_states.detach().abs().max().item() < 1e6 else 0.5
            return inner(self, hidden_states * scale, *args, **kwargs)

    layer.__class__ = Scaled
    return model


def test_a_model_that_cannot_be_counted_is_attached_cautiously(caplog: pytest.LogCaptureFixture) -> None:
    model = uncountable()
    reference = Resident(model, **HYPER)
    with caplog.at_level(logging.WARNING):
        engine = megatrain.attach(model, device="checked", lockstep=2)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "nothing is planned, and memory is used cautiously" in warning
    assert engine.choice == Choice(lockstep=2).with_defaults(4)
    assert_same_steps(engine, engine.adamw(**HYPER, max_grad_norm=0.5), reference, num_micro_batches=2)


def test_a_cautious_choice_takes_less_where_the_device_is_small() -> None:
    chosen = []
    for nbytes in (1 << 20, 159_743, 128_511):
        engine = megatrain.attach(uncountable(), device=EmulatedLanes(EmulatedMachine(device_bytes=nbytes)))
        chosen.append((engine.choice.num_slots, engine.choice.fragments))
        engine.detach()
    assert chosen == [(2, False), (1, False), (2, True)], "of 159,744 bytes, 128,512 and 121,344"


def test_only_counting_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the choice or the model itself is refused, counted or not."""
    given = Conditions(lanes=InlineLanes(), job=Job())
    with pytest.raises(ConfigError, match="activations names 3 policies for 4 layers"):
        resolve(uncountable(), Choice(activations=("keep",) * 3), given)
    with pytest.raises(ModelError, match="no list of decoder layers"):
        resolve(torch.nn.Linear(2, 2), Choice(), given)


def test_a_plan_changes_no_bit_of_a_plain_run() -> None:
    """The same seeds, the same micro-batches: planned, and with everything spelled out."""
    masters = []
    for attach in (attach_plainly, megatrain.attach):
        engine = attach(make_model(FAMILIES["qwen2"]()), device="checked")
        optimizer = engine.adamw(**HYPER)
        for step in range(2):
            engine.forward_backward(make_batches(4, seed=step), seeds=[step, 1, 2, 3])
            optimizer.step()
        masters.append(dict(engine.named_masters()))
    for name, master in masters[0].items():
        assert_same_bits(masters[1][name], master, name)
