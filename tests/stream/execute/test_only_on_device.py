"""Resident blocks whose state is on the device and nowhere else."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import CapacityError, ConfigError
from megatrain.hardware.memory import MemoryLimit
from megatrain.plan.program.features.resident import Push
from megatrain.store import read_in
from megatrain.stream.execute import resident_state
from megatrain.train.loop import train
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.execute.test_resident_state import train_steps
from tests.stream.execute.test_updates import HeldLanes, planes_of
from tests.stream.runs import HYPER, check_parity
from tests.train.project import make_config, train_until
from tests.train.test_loop import assert_same_runs

ALONE: dict[str, Any] = {"resident_layers": 2, "mirror_resident": False}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["llama", "llama_tied", "mixtral"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", [{}, {"outer_resident": True}, {"resident_layers": 4, "lockstep": 2}])
def test_bits_are_those_of_resident_training(family: str, precision: str, settings: dict[str, Any]) -> None:
    if precision == "fp32":
        check_parity(family, num_micro_batches=2, **ALONE | settings)
        return
    trained = [_masters(family, **ALONE | settings | {"mirror_resident": mirror}) for mirror in (True, False)]
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name


def _masters(family: str, **settings: Any) -> dict[str, Tensor]:
    engine = attach_plainly(
        make_model(FAMILIES[family]()), precision="bf16", device="checked", num_micro_batches=2, **settings
    )
    optimizer = engine.adamw(**HYPER)
    for _ in range(2):
        engine.forward_backward(make_batches(2))
        optimizer.step()
    return dict(engine.named_masters())


def trained(**settings: Any) -> tuple[Any, Any]:
    """Train two steps."""
    engine = attach_plainly(make_model(FAMILIES["llama"]()), precision="bf16", **ALONE | settings)
    optimizer = engine.adamw(**HYPER)
    train_steps(engine, optimizer, 2)
    return engine, optimizer


def at_home(engine: Any, block: int) -> dict[str, int]:
    """Count the values other than zero in the places of a block's planes in RAM."""
    state = engine.host.blocks[block]
    found = {"working": state.working, **state.planes}
    return {name: int(plane.count_nonzero()) for name, plane in found.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", ["cpu", "checked", "emulated"])
def test_their_places_in_ram_are_empty_but_while_somebody_reads(device: str) -> None:
    """What is lent, and what is read by name, is the state that the last step has left."""
    engine, _ = trained(device=device)
    expected = planes_of(trained(device=device, mirror_resident=True)[0])
    engine.settle()
    assert {n for block in (0, 1) for n in at_home(engine, block).values()} == {0}
    assert all(at_home(engine, 2).values())
    with engine.host.borrow(1) as state:
        for name, plane in {"working": state.working, **state.planes}.items():
            assert torch.equal(plane, expected[f"{name} of block 1"]), name
    assert torch.equal(engine.host.weights.read(0), expected["working of block 0"])
    assert {n for block in (0, 1) for n in at_home(engine, block).values()} == {0}
    engine.sync()
    assert torch.equal(engine.host.blocks[0].working, expected["working of block 0"])
    assert engine.host.weights.are_whole
    train_steps(engine, engine.optimizer, 1, first=2)
    assert not engine.host.weights.are_whole


def test_what_the_host_writes_is_what_the_device_computes_with() -> None:
    """By `put`, by a block that was lent to be written, and by parameters after `sync`."""
    found = []
    for mirror in (True, False):
        engine, optimizer = trained(mirror_resident=mirror)
        engine.sync()
        name = "model.layers.1.mlp.up_proj.weight"
        engine.host.put(name, torch.full_like(dict(engine.named_masters())[name], 0.01))
        with engine.host.borrow(0, writes=True) as state:
            state.planes["exp_avg"].fill_(0.25)
        with torch.no_grad():
            engine.model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
        engine.weights_changed()
        train_steps(engine, optimizer, 2, first=2)
        found.append(dict(engine.named_masters()))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_detach_and_reconfigure_bring_the_state_home() -> None:
    """So a model that is given back has its weights, and one that goes on with other slots its moments."""
    engine, optimizer = trained()
    expected, expected_optimizer = trained(mirror_resident=True)
    for each in (engine, expected):
        each.reconfigure(replace(each.choice, num_slots=1))
    train_steps(engine, optimizer, 1, first=2)
    train_steps(expected, expected_optimizer, 1, first=2)
    masters = dict(expected.named_masters())
    model = engine.model
    for each in (engine, expected):
        each.detach()
    for (name, parameter), wanted in zip(model.named_parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(parameter, wanted), name
    again = attach_plainly(model, precision="bf16", **ALONE)
    for name, value in again.named_masters():
        assert torch.equal(value, masters[name]), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", ["detach", "reconfigure", "sync"])
def test_no_room_in_ram_is_one_sentence_and_training_goes_on(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, optimizer = trained()
    args = (replace(engine.choice, num_slots=1),) if call == "reconfigure" else ()
    with monkeypatch.context() as patch:
        for module in (resident_state, read_in):
            patch.setattr(module, "host_memory", lambda: MemoryLimit(1000, "a test"))
        with pytest.raises(CapacityError, match=r"host memory: the (state|weights) .* (save|read) "):
            getattr(engine, call)(*args)
    train_steps(engine, optimizer, 1, first=2)
    expected, other = trained(mirror_resident=True)
    train_steps(expected, other, 1, first=2)
    masters = dict(engine.named_masters())
    assert all(torch.equal(value, masters[name]) for name, value in expected.named_masters())


def test_other_residents_are_refused_for_a_running_engine() -> None:
    engine, _ = trained()
    for change in ({"resident_layers": 1}, {"mirror_resident": True}, {"outer_resident": True}):
        with pytest.raises(ConfigError, match=r"on the device alone .*; detach the engine, and attach again"):
            engine.reconfigure(replace(engine.choice, **change))


def test_a_checkpoint_goes_on_wherever_the_state_is(tmp_path: Path) -> None:
    """Six steps in three pieces: on the device alone, streamed, and on the device alone again."""
    short: dict[str, Any] = {"train": {"precision": "bf16", "steps": 6}, "checkpoint": {"every": 2}}
    train(make_config(tmp_path, "whole", **short))
    for number, last in ((3, 2), (0, 4), (2, 6)):
        memory = {"resident_blocks": number, "mirror_resident": False, "on_mismatch": "stop"}
        train_until(make_config(tmp_path, "moved", **short, memory=memory), last)
    assert_same_runs(tmp_path / "moved", tmp_path / "whole")


@pytest.mark.parametrize("fault", [False, True])
def test_a_block_that_is_read_has_had_its_update(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint waits for updates in the background: without, its block is that of the step before."""
    lanes = HeldLanes()
    engine, optimizer = trained(device=lanes)
    before = planes_of(trained(mirror_resident=True)[0])
    other, other_optimizer = trained(mirror_resident=True)
    train_steps(other, other_optimizer, 1, first=2)
    after = planes_of(other)
    if fault:
        touches = Push.touches
        monkeypatch.setattr(Push, "touches", lambda self: ((), touches(self)[1]))
    lanes.may_go.clear()
    train_steps(engine, optimizer, 1, first=2)
    threading.Timer(0.5, lanes.may_go.set).start()
    with engine.host.borrow(0) as found:
        name, plane = "exp_avg of block 0", found.planes["exp_avg"]
        assert torch.equal(plane, before[name] if fault else after[name])
    assert not torch.equal(before[name], after[name])
    engine.settle()


MEASURED = """
import gc, torch, transformers, megatrain
from megatrain.config.choice import Choice
from megatrain.hardware import resident_bytes
config = transformers.LlamaConfig(vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
torch.set_num_threads(1)
choice = Choice(resident_layers=3, mirror_resident=False).with_defaults(4)
engine = megatrain.attach(model, choice, device="emulated", precision="bf16")
optimizer = engine.adamw(updates="serial")
ids = torch.arange(2)[None]
for _ in range(2):
    engine.forward_backward([{"input_ids": ids, "labels": ids}])
    optimizer.step()
engine.settle()
gc.collect()
once = resident_bytes()
engine.executor.states.bring_home()
print(resident_bytes() - once, sum(layout.num_parameters for layout in engine.host.layouts[:3]))
"""


def test_a_block_on_the_device_alone_is_in_memory_once() -> None:
    """The device of this test is host memory: by the kernel's count, places in RAM take 12 bytes more."""
    ended = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    nbytes, numel = map(int, ended.stdout.split())
    assert 11.8 < nbytes / numel < 12.2
