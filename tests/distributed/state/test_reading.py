"""What all ranks read together, of state that other ranks and nodes have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.config.choice import StepBatch
from megatrain.config.sections.eval import EvalConfig
from megatrain.distributed.alone import ALONE
from megatrain.errors import CapacityError
from megatrain.hardware.memory import MemoryLimit
from megatrain.store import read_in
from megatrain.stream.engine import Engine
from megatrain.stream.execute import resident_state
from megatrain.stream.execute.resident_state import DeviceStates
from megatrain.train.adapters import write_adapter
from megatrain.train.evaluate.evaluator import Evaluator
from megatrain.train.resume.state import lend_state, read_state, write_state
from tests.distributed.cases import TRAINED, cut_at
from tests.distributed.processes import exit_codes
from tests.distributed.state.test_drives import tiers
from tests.distributed.threads import RankLanes, Turns
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER

BATCH = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=4, num_runs=4)


@pytest.fixture(autouse=True)
def _small_shares() -> Iterator[None]:
    """Cut blocks so that every rank has a share; not in the threads of ranks, since it is of all of them."""
    with cut_at(320):
        yield


def trained(
    ranks: Any, trained: str = "all", device: str | None = None, **settings: Any
) -> tuple[Engine, Callable[[], None]]:
    """Return an engine, and a function that takes a step with it."""
    model = make_model(FAMILIES["llama"]())
    TRAINED[trained](model)
    lanes: Any = "checked" if ranks is ALONE else device or RankLanes(ranks.turns, ranks.rank)
    engine = attach_plainly(model, device=lanes, batch=BATCH, ranks=ranks, precision="bf16", **settings)
    optimizer = engine.adamw(**HYPER)
    own = engine.parts(4)[ranks.rank]

    def step() -> None:
        batches = make_batches(4, seed=0)
        engine.forward_backward([batches[number] for number in own], seeds=list(own))
        optimizer.step()

    return engine, step


def all_read(ranks: Any, read: Callable[[Engine], Any], **settings: Any) -> Any:
    """Take a step; then all ranks read. Return what this one has read."""
    engine, step = trained(ranks, **settings)
    step()
    return read(engine)


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    """Read twice at the same time, and leave the first one in the middle."""
    left = engine.named_masters()
    next(left)
    return dict(engine.named_masters())


def masters_within(engine: Engine) -> dict[str, torch.Tensor]:
    """Read twice at the same time: the first one is within a block while the second reads all."""
    within = engine.named_masters()
    names = [name for name, _ in engine.model.named_parameters()]
    read = [next(within) for _ in range(1 + names.index("model.layers.1.self_attn.q_proj.weight"))]
    found = dict(engine.named_masters())
    for name, value in (*read, *within):
        assert torch.equal(found[name], value), name
    return found


RESIDENT: dict[str, Any] = {"resident_layers": 4, "gradients": "device"}
ALONE_THERE: dict[str, Any] = {"resident_layers": 2, "mirror_resident": False}


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("settings", [{}, RESIDENT, ALONE_THERE], ids=["", "resident", "on the device alone"])
def test_all_ranks_read_masters_of_all(shape: tuple[int, int], settings: dict[str, Any]) -> None:
    alone = all_read(ALONE, masters_within, **settings)
    for found in Turns(*shape).run(lambda ranks: all_read(ranks, masters_within, **settings)):
        assert found.keys() == alone.keys()
        assert [name for name, value in alone.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 2)], ids=str)
def test_all_ranks_read_masters_on_drives_of_all(shape: tuple[int, int], tmp_path: Path) -> None:
    alone = all_read(ALONE, masters)
    for found in Turns(*shape).run(lambda ranks: all_read(ranks, masters, tiers=tiers(tmp_path))):
        assert [name for name, value in alone.items() if not torch.equal(found[name], value)] == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 2)], ids=str)
def test_what_ranks_write_to_blocks_on_their_devices_alone_is_trained_with(shape: tuple[int, int]) -> None:
    """The first of each node writes, by `put`, by parameters and as a checkpoint does; the others follow."""

    def run(ranks: Any) -> dict[str, torch.Tensor]:
        engine, step = trained(ranks, **ALONE_THERE)
        host, (is_first, name) = engine.host, (ranks.local_rank == 0, "model.layers.1.mlp.up_proj.weight")
        step()
        engine.sync()
        ranks.meet()
        if is_first:
            with torch.no_grad():
                engine.model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
        engine.weights_changed()
        number = host.number_of(name)
        value = torch.full_like(dict(engine.model.named_parameters())[name], 0.01, dtype=torch.float32)
        if is_first:
            host.put(name, value)
            with host.borrow(0, writes=True) as block:
                block.planes["exp_avg"].fill_(0.25)
        else:
            host.follow(number)
            host.follow(0)
        engine.weights_changed()
        step()
        assert {int(plane.count_nonzero()) for plane in host.blocks[0].planes.values()} == {0}
        ranks.meet()  # before another one reads
        return dict(engine.named_masters())

    alone = run(ALONE)
    for found in Turns(*shape).run(run):
        assert [name for name, value in alone.items() if not torch.equal(found[name], value)] == []


def test_ranks_bring_what_is_on_their_devices_alone_home_together() -> None:
    """With other slots training goes on; a node without room is one sentence on all, and changes nothing."""

    def run(ranks: Any) -> dict[str, torch.Tensor]:
        engine, step = trained(ranks, **ALONE_THERE)
        step()
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == ranks.size - 1:
                patch.setattr(resident_state, "host_memory", lambda: MemoryLimit(1000, "a test"))
            with pytest.raises(
                CapacityError, match=r"of 2 blocks is on the device alone, .* save a checkpoint"
            ):
                engine.reconfigure(replace(engine.choice, num_slots=1))
        engine.reconfigure(replace(engine.choice, num_slots=1))
        step()
        masters = dict(engine.named_masters())
        engine.sync()
        before = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
        engine.detach()
        for name, parameter in engine.model.named_parameters():
            assert torch.equal(parameter, before[name]), name
        return masters

    engine, step = trained(ALONE, resident_layers=2)
    for _ in range(2):
        step()
    expected = dict(engine.named_masters())
    for found in Turns(4, 2).run(run):
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [None, (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("where", ["room", "device"])
def test_a_change_that_fails_on_one_rank_changes_none(shape: tuple[int, int] | None, where: str) -> None:
    """Whether before the state is on the device again or after: it used to be read from pages given back."""

    def run(ranks: Any) -> dict[str, torch.Tensor]:
        engine, step = trained(ranks, **ALONE_THERE)
        step()
        before, held = dict(engine.named_masters()), engine.lanes.device_bytes
        with pytest.MonkeyPatch.context() as patch:
            calls: list[int] = []

            def fail(*given: Any) -> None:
                calls.append(1)
                if len(calls) == 1:
                    raise CapacityError("the device is full")
                right(*given)

            if ranks.rank == ranks.size - 1:
                owner, name = (engine, "_make_room") if where == "room" else (DeviceStates, "_allocate")
                right = getattr(owner, name)
                own: Any = engine.executor.lanes
                there = lambda states: (fail if states._lanes is own else right)(states)  # noqa: E731
                patch.setattr(owner, name, fail if where == "room" else there)
            said = "the device is full" if ranks.rank == ranks.size - 1 else "another rank"
            with pytest.raises(CapacityError, match=said):
                engine.reconfigure(replace(engine.choice, num_slots=1))
            ranks.meet()
        assert engine.lanes.device_bytes == held
        after = dict(engine.named_masters())
        assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []
        step()
        return dict(engine.named_masters())

    engine, step = trained(ALONE, resident_layers=2)
    for _ in range(2):
        step()
    expected = dict(engine.named_masters())
    for found in [run(ALONE)] if shape is None else Turns(*shape).run(run):
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("alone", ["the first", "the last"])
def test_weights_that_one_rank_has_read_in_are_taken_from_nowhere_else(
    alone: str, shape: tuple[int, int]
) -> None:
    """Nor are they taken away from it while others borrow, nor left behind after a step."""

    def run(ranks: Any) -> dict[str, torch.Tensor]:
        engine, step = trained(ranks, **ALONE_THERE)
        step()
        is_reader = ranks.rank == (0 if alone == "the first" else ranks.size - 1)
        before, weight = dict(engine.named_masters()), engine.model.model.layers[1].mlp.up_proj.weight
        if is_reader:
            engine.sync()
        dict(engine.named_masters())
        assert bool(weight.count_nonzero()) or not is_reader
        engine.weights_changed()
        after = dict(engine.named_masters())
        assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []
        step()
        ranks.meet()
        assert not weight.count_nonzero()
        ranks.meet()
        return dict(engine.named_masters())

    engine, step = trained(ALONE, resident_layers=2)
    for _ in range(2):
        step()
    expected = dict(engine.named_masters())
    for found in Turns(*shape).run(run):
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_ranks_after_the_first_want_no_room_for_weights_that_are_there(monkeypatch: Any) -> None:
    def run(ranks: Any) -> None:
        engine, step = trained(ranks, **ALONE_THERE)
        step()
        room = engine.host.on_device.working_bytes if ranks.rank == 0 else 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(read_in, "host_memory", lambda: MemoryLimit(room, "a test"))
            engine.sync()
        ranks.meet()
        assert engine.model.model.layers[1].mlp.up_proj.weight.count_nonzero()
        ranks.meet()

    Turns(2).run(run)


def read_damaged(ranks: Any, *, saved: str) -> None:
    """Save, take a tensor away, and read; both ranks as a run does."""
    with cut_at(320):
        engine, step = trained(ranks, device="cpu", **ALONE_THERE)
        step()
        if ranks.rank == 0:
            Path(saved).mkdir()
            write_state(engine, Path(saved))
            file = sorted((Path(saved) / "state").iterdir())[1]
            tensors = load_file(file)
            tensors.pop(next(iter(tensors)))
            save_file(tensors, file)
        else:
            lend_state(engine)
        ranks.meet("orders")
        read_state(engine.host, Path(saved), reads=ranks.local_rank == 0)


def test_a_checkpoint_that_lacks_a_tensor_ends_all_ranks_in_a_sentence(tmp_path: Path) -> None:
    """The first one finds that within a block that all have brought; the others must not wait for it."""
    codes = exit_codes(tmp_path / "ranks", 2, read_damaged, timeout_s=20, saved=str(tmp_path / "saved"))
    assert codes == [2, 7]
    assert "does not have each element of " in (tmp_path / "ranks/errors").read_text()


def test_the_first_rank_saves_adapters_and_their_state_over_nodes(tmp_path: Path) -> None:
    tokenizer: Any = SimpleNamespace(save_pretrained=lambda out: None)

    def save(ranks: Any, place: Path) -> None:
        engine, step = trained(ranks, "adapters")
        step()
        engine.settle()
        if ranks.rank > 0:
            lend_state(engine)
            return
        place.mkdir()
        write_adapter(engine, tokenizer, place, base="base")
        write_state(engine, place)

    save(ALONE, tmp_path / "one")
    Turns(4, 2).run(lambda ranks: save(ranks, tmp_path / "nodes"))
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "nodes" / file).read_bytes(), file
    assert any(
        value.any() for name, value in load_file(tmp_path / "one" / files[0]).items() if "lora_B" in name
    )


@pytest.mark.parametrize("size", [2, 4])
def test_weights_on_drives_are_read_by_the_rank_that_continues_a_prompt(size: int, tmp_path: Path) -> None:
    """All ranks evaluate; memory for the weights that the drives have is taken once."""

    def answer(_: Evaluator, engine: Engine, *__: Any) -> str:
        engine.sync()
        return ""

    def run(ranks: Any) -> int:
        engine, step = trained(ranks, tiers=tiers(tmp_path))
        step()
        evaluator = Evaluator(EvalConfig(prompts=("a",)), [], num_steps=4, steps_per_epoch=4)
        evaluator.evaluate(engine, SimpleNamespace(), 1, ranks)
        found = engine.host.weights.nbytes
        step()
        return found

    with patch.object(Evaluator, "_answer", answer):
        first, *others = Turns(size).run(run)
    assert first > 0
    assert others == [0] * (size - 1)
