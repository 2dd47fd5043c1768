"""Layers that stay on the device with all of their state: nothing of them moves until the host asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import CapacityError, ConfigError
from megatrain.plan.program.operations import Operation
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from megatrain.train.loop import train
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.execute.test_updates import assert_same_planes, planes_of
from tests.stream.runs import HYPER, assert_same_masters, assert_same_steps, start
from tests.train.project import make_config, train_until
from tests.train.test_loop import assert_same_runs


def issued(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """Record the operations that the executor issues."""
    operations: list[Operation] = []
    issue = engine.executor.issue

    def record(operation: Operation) -> None:
        operations.append(operation)
        issue(operation)

    monkeypatch.setattr(engine.executor, "issue", record)
    return operations


def crossings(engine: Engine) -> list[str]:
    """Return what has crossed the link since the last call, by the lanes' own record."""
    lanes = ("fetch", "offload", "pull", "push", "save", "restore")
    return [span.label for span in engine.lanes.take_record().spans if span.label.startswith(lanes)]


def train_steps(engine: Engine, optimizer: Any, num: int, *, first: int = 0, micro_batches: int = 2) -> None:
    for step in range(first, first + num):
        engine.forward_backward(make_batches(micro_batches, seed=step))
        optimizer.step()


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lockstep", [1, 2])
def test_only_streamed_blocks_cross_the_link(lockstep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four layers are resident; the embedding, the norm and the head go home once per step."""
    _, _, engine, optimizer = start("llama", resident_layers=2, lockstep=lockstep)
    assert engine.arrangement.residents == {0, 1}
    train_steps(engine, optimizer, 1)
    operations, counts = issued(engine, monkeypatch), engine.executor.counts
    fetches, offloads = counts.fetches, counts.offloads
    train_steps(engine, optimizer, 1, first=1)
    moved = [(operation.label, operation.block) for operation in operations]
    outer = [block.index for block in engine.arrangement.outer]
    assert {block for kind, block in moved if kind in ("fetch", "load")} == {2, 3, *outer}
    assert {block for kind, block in moved if kind == "offload"} == {2, 3, *outer}
    for block in outer:
        assert moved.count(("fetch", block)) == moved.count(("offload", block)) == 1
    # a round: both are fetched for the forward, and are still in their slots for the backward
    num_rounds = 2 // lockstep
    assert counts.fetches - fetches == sum(kind == "fetch" for kind, _ in moved) - len(outer)
    assert 2 <= counts.fetches - fetches <= 2 * 2 * num_rounds
    assert counts.offloads - offloads == 2 * num_rounds


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_everything_resident_nothing_moves(precision: str) -> None:
    """Not a byte after the first step, until the host state is asked for; then all of it, once."""
    _, _, engine, optimizer = start("llama_tied", resident_layers=4, precision=precision)
    assert engine.arrangement.residents == set(range(len(engine.host.layouts)))
    crossings(engine)
    train_steps(engine, optimizer, 1)
    assert {label.split()[0] for label in crossings(engine)} == {"pull"}
    fetched, offloaded = engine.counts.fetch_bytes, engine.counts.offload_bytes
    for step in range(1, 4):
        engine.forward_backward(make_batches(3, seed=step))
        assert optimizer.step().grad_norm > 0
    assert (engine.counts.fetch_bytes, engine.counts.offload_bytes) == (fetched, offloaded)
    assert crossings(engine) == []
    engine.sync()
    assert crossings(engine) == [f"push      b{block}" for block in range(len(engine.host.layouts))]
    engine.sync()
    assert crossings(engine) == []


# -- coming home ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@every_value(precision=["fp32", "bf16"], resident_layers=[4, 1], device=["checked", "emulated"])
def test_sync_brings_every_plane_home(precision: str, resident_layers: int, device: str) -> None:
    """Weights, remainders and both moments, byte for byte those of a run that streams everything."""
    found = []
    for number, name in ((0, "cpu"), (resident_layers, device)):
        model = make_model(FAMILIES["llama_tied"]())
        engine = attach_plainly(model, device=name, precision=precision, resident_layers=number)
        optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
        train_steps(engine, optimizer, 3)
        exp_avg = engine.host.blocks[0].planes["exp_avg"]
        assert (exp_avg.count_nonzero() == 0) == (number > 0), "the home is not where the state is"
        found.append(planes_of(engine))
        train_steps(engine, optimizer, 1, first=3)
        found[-1] |= {f"{name} later": plane for name, plane in planes_of(engine).items()}
        engine.detach()
    assert found[0].keys() == found[1].keys()
    for name, plane in found[1].items():
        assert torch.equal(plane, found[0][name]), name


def test_what_the_host_writes_is_what_the_device_computes_with() -> None:
    """After `weights_changed`, and not before: the host's planes are the newer ones then."""
    _, reference, engine, optimizer = start("llama", resident_layers=4)
    assert_same_steps(engine, optimizer, reference, steps=1)
    engine.sync()
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        value = reference.parameters[name] * 1.5
        reference.parameters[name].copy_(value)
        reference.masters[name][: value.numel()].copy_(value.flatten())
    engine.host.put(name, value.detach())
    engine.weights_changed()
    assert_same_steps(engine, optimizer, reference, first=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_moves_between_streamed_and_resident_runs(precision: str) -> None:
    """The same planes go on to the same bits, wherever they are."""
    settings: dict[str, Any] = {"precision": precision, "device": "checked"}
    engines = [
        attach_plainly(make_model(FAMILIES["llama"](), seed=seed), resident_layers=number, **settings)
        for seed, number in ((0, 0), (7, 4), (8, 2))
    ]
    optimizers = [engine.adamw(**HYPER, max_grad_norm=0.5) for engine in engines]
    for engine, optimizer, num in zip(engines, optimizers, (3, 2, 1), strict=True):
        train_steps(engine, optimizer, num)  # a resident run with a state of its own
    for previous, following in ((0, 1), (1, 2), (2, 0)):
        expected = planes_of(engines[previous])
        engines[following].sync()
        for number, block in enumerate(engines[following].host.blocks):
            for plane in ("working", "remainder", "exp_avg", "exp_avg_sq"):
                if (tensor := block.find_plane(plane)) is not None:
                    tensor.copy_(expected[f"{plane} of block {number}"])
        engines[following].weights_changed()
        optimizers[following].steps = dict(optimizers[previous].steps)
        for index in (previous, following):
            train_steps(engines[index], optimizers[index], 2, first=3)
        assert_same_planes(engines[following], planes_of(engines[previous]))


def test_a_checkpoint_of_a_streamed_run_goes_on_in_a_resident_one(tmp_path: Path) -> None:
    """And back: 6 steps in three pieces, the second with everything on the device."""
    short: dict[str, Any] = {"train": {"precision": "bf16", "steps": 6}, "checkpoint": {"every": 2}}
    train(make_config(tmp_path, "whole", **short))
    for resident_layers, last in ((0, 2), (3, 4), (1, 6)):
        train_until(
            make_config(tmp_path, "moved", **short, memory={"resident_blocks": resident_layers}), last
        )
    assert_same_runs(tmp_path / "moved", tmp_path / "whole")


# -- refusals ------------------------------------------------------------------------------------------------


def test_bad_counts_are_refused() -> None:
    model = make_model(FAMILIES["llama"]())
    with pytest.raises(ConfigError, match="is 5, but the model has 4 layers; use at most"):
        attach_plainly(model, resident_layers=5)
    with pytest.raises(ConfigError, match="resident_layers is -1; use 0 or more, or auto"):
        attach_plainly(model, resident_layers=-1)
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=300_000))
    sentence = r"device memory: .*resident optimizer state.*the limit is .*use memory.resident_blocks=0"
    with pytest.raises(CapacityError, match=sentence):
        attach_plainly(model, device=lanes, resident_layers=4)
    assert lanes.device_bytes == 0
    engine = attach_plainly(model, device="checked", resident_layers=4)
    assert_same_masters(engine, start("llama")[1])
