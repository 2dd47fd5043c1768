"""Failures in the middle of a step: a state that is torn is used no more, and one that is whole goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megatrain.errors import ConfigError, ModelError, TornStateError
from megatrain.layout.blocks import BlockLayout
from megatrain.optim import adamw as kernels
from megatrain.store import on_drives as away
from megatrain.store import placement
from megatrain.store.drives import system as calls
from megatrain.store.placement import Tiers
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import Lanes
from megatrain.train.resume.state import write_model, write_state
from tests.families import FAMILIES
from tests.products import every_pair, every_value
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.store.disks import Counted
from tests.stream.execute.test_updates import HeldLanes
from tests.stream.runs import HYPER, assert_same_masters

DEVICES = ("cpu", "checked", "emulated")
SCHEDULES = ("deferred", "immediate", "serial")


def start(
    device: Any, updates: str = "deferred", tiers: Tiers | None = None, **settings: Any
) -> tuple[PreTrainedModel, Resident, Engine, Any]:
    """Make a resident model, and a streamed one with the same optimizer; no clipping."""
    model = make_model(FAMILIES["llama_tied"]())
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device=device, tiers=tiers, **settings)
    return model, reference, engine, engine.adamw(**HYPER, max_grad_norm=None, updates=updates)


def one_step(engine: Engine, optimizer: Any, seed: int) -> None:
    """Take a step, and wait for its updates."""
    engine.forward_backward(make_batches(1, seed=seed))
    optimizer.step()
    engine.settle()


def reference_step(reference: Resident, seed: int) -> None:
    reference.forward_backward(make_batches(1, seed=seed))
    reference.step(reference.norm(), None)


class FailingKernel:
    """The kernel of updates, which stops in the middle of one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self.fails_at = -1
        self._kernel = kernels.update_many
        monkeypatch.setattr(kernels, "update_many", self)

    def __call__(self, pool: Any, views: list[Any], apart: Any = ()) -> None:
        self.num_calls += 1
        if self.num_calls - 1 == self.fails_at:
            self._kernel(pool, views[:1])
            raise OSError(5, "the drive is gone")
        self._kernel(pool, views, apart)


def fail_at(lanes: Lanes, label: str, *, number: int = 0) -> None:
    """Let the `number`-th operation from now on whose label begins so fail in its lane."""
    submit, left = lanes._submit, [number]

    def failing(lane: Any, function: Callable[[], object], work: float, found: object) -> None:
        def fail() -> None:
            raise OSError(5, f"no {label}")

        if str(found).startswith(label):
            left[0] -= 1
            function = fail if left[0] == -1 else function
        submit(lane, function, work, found)

    lanes._submit = failing  # type: ignore[method-assign, assignment]


def uses(engine: Engine, optimizer: Any, directory: Path) -> dict[str, Callable[[], object]]:
    """List everything that trains with, saves or reads the state through an engine."""
    model: Any = engine.model
    batch = make_batches(1, seed=9)[0]

    def evaluate() -> None:
        with torch.no_grad():
            model(**batch)

    return {
        "step": lambda: engine.forward_backward([batch]),
        "forward": lambda: model(**batch),
        "evaluation": evaluate,
        "optimizer step": optimizer.step,
        "sync": engine.sync,
        "settle": engine.settle,
        "masters": lambda: dict(engine.named_masters()),
        "gradients": engine.named_gradients,
        "optimizer state": optimizer.state_dict,
        "model state": model.state_dict,
        "save_pretrained": partial(model.save_pretrained, directory / "saved"),
        "export": partial(write_model, engine, None, directory),
        "checkpoint": partial(write_state, engine, directory),
        "commit": lambda: engine.executor.commit(3, {}, None),
        "reconfigure": lambda: engine.reconfigure(engine.choice),
        "weights_changed": engine.weights_changed,
        "detach": engine.detach,
    }


def assert_poisoned(engine: Engine, optimizer: Any, directory: Path, first: str) -> None:
    """Assert that nothing can be done any more, that all say why, and that nothing changes."""
    weights = [state.working.clone() for state in engine.host.blocks]
    counts = dict(optimizer.steps)
    for name, use in uses(engine, optimizer, directory).items():
        with pytest.raises(TornStateError, match=rf"{first}.*torn.*load the newest checkpoint") as caught:
            use()
        assert first in str(caught.value.__cause__), name
    assert optimizer.steps == counts
    for state, before in zip(engine.host.blocks, weights, strict=True):
        assert torch.equal(state.working, before)
    assert list(directory.rglob("*.safetensors")) == []
    engine.close()  # what has been told is not told again


@pytest.fixture
def drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiers:
    """Tiers that put the state of every block, and all weights, on one drive."""

    def forced(layouts: Sequence[BlockLayout], tiers: Tiers, **kept: Any) -> placement.Placement:
        return placement.placed(layouts, tiers, 0, 0, **kept)

    monkeypatch.setattr(away, "place", forced)
    monkeypatch.setattr(calls, "system", Counted())
    return Tiers(nvme=(tmp_path / "drive",), ram=1 << 30)


@every_pair(
    device=list(DEVICES), updates=list(SCHEDULES), which=["first", "middle", "last"], place=["RAM", "drives"]
)
def test_an_update_that_fails_poisons_the_engine(
    device: str,
    updates: str,
    which: str,
    place: str,
    tmp_path: Path,
    drives: Tiers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = FailingKernel(monkeypatch)
    _, _, engine, optimizer = start(device, updates, drives if place == "drives" else None)
    one_step(engine, optimizer, 0)
    count = kernel.num_calls
    assert count >= 5
    kernel.fails_at = count + {"first": 0, "middle": count // 2, "last": count - 1}[which]
    with pytest.raises(OSError, match="the drive is gone"):
        one_step(engine, optimizer, 1)
    assert kernel.num_calls == kernel.fails_at + 1
    assert_poisoned(engine, optimizer, tmp_path, "the drive is gone")
    assert kernel.num_calls == kernel.fails_at + 1


# -- failures that cost a step, and nothing else -------------------------------------------------------------


BEFORE_UPDATES = {"offload": "offload", "norm": "norm", "first read": "read "}


@every_value(device=list(DEVICES), name=list(BEFORE_UPDATES), updates=["deferred", "serial"])
def test_a_step_that_fails_before_its_first_update_is_dropped(
    updates: str, name: str, device: str, drives: Tiers
) -> None:
    _, reference, engine, optimizer = start(device, updates, drives if name == "first read" else None)
    one_step(engine, optimizer, 0)
    fail_at(engine.lanes, BEFORE_UPDATES[name])
    with pytest.raises(OSError, match=f"no {BEFORE_UPDATES[name]}"):
        one_step(engine, optimizer, 1)
    for seed in (1, 2):
        one_step(engine, optimizer, seed)
    for seed in (0, 1, 2):
        reference_step(reference, seed)
    assert_same_masters(engine, reference)
    assert set(optimizer.steps.values()) == {3}
    engine.close()


class Mistake(Exception):
    """Of the user's."""


@pytest.mark.parametrize("error", [Mistake, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("in_backward", [False, True])
def test_an_error_of_the_model_costs_its_step_even_with_updates_running(
    in_backward: bool, error: type[BaseException]
) -> None:
    """The updates of the step before are held up in the background, and done all the same."""
    lanes = HeldLanes()
    model, reference, engine, optimizer = start(lanes)
    lanes.may_go.clear()
    engine.forward_backward(make_batches(1, seed=0))
    optimizer.step()
    threading.Timer(0.2, lanes.may_go.set).start()

    def fail(*_: Any) -> None:
        raise error("of the model")

    layer = model.model.layers[1]
    hook = layer.register_full_backward_hook(fail) if in_backward else layer.register_forward_hook(fail)
    with pytest.raises(error, match="of the model"):
        engine.forward_backward(make_batches(1, seed=1))
    hook.remove()
    one_step(engine, optimizer, 1)
    for seed in (0, 1):
        reference_step(reference, seed)
    assert_same_masters(engine, reference)
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_the_model_poisons_if_blocks_were_updated_in_the_same_backward(
    device: str, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise Mistake("of the model")

    model, _, engine, optimizer = start(device, "immediate")
    one_step(engine, optimizer, 0)
    hook = model.model.layers[3].register_forward_hook(fail)
    with pytest.raises(Mistake):  # nothing is updated in a forward
        engine.forward_backward(make_batches(1, seed=1))
    hook.remove()
    one_step(engine, optimizer, 1)
    model.model.layers[1].register_full_backward_hook(fail)
    with pytest.raises(Mistake):
        engine.forward_backward(make_batches(1, seed=2))
    engine.lanes.drain()  # updates that were enqueued before are done
    assert_poisoned(engine, optimizer, tmp_path, "of the model")


def test_gradients_that_have_updated_their_blocks_cannot_be_dropped() -> None:
    _, reference, engine, optimizer = start("checked", "immediate")
    engine.forward_backward(make_batches(1, seed=0))
    for drop in (optimizer.zero_grad, lambda: engine.forward_backward(make_batches(1, seed=1))):
        with pytest.raises(ConfigError, match=r"updates=immediate.*call opt\.step\(\) to finish the step"):
            drop()
    optimizer.step()
    reference_step(reference, 0)
    assert_same_masters(engine, reference)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_a_backward_that_failed_are_not_used(device: str) -> None:
    """In a loop of the user's, who catches the error and goes on."""
    model, reference, engine, optimizer = start(device)
    fail_at(engine.lanes, "offload", number=1)
    loss = model(**make_batches(1, seed=0)[0]).loss
    with pytest.raises(OSError, match="no offload"):  # noqa: PT012  # told in the backward, or right after it
        loss.backward()
        engine.named_gradients()
    for use in (optimizer.step, lambda: model(**make_batches(1, seed=0)[0])):
        with pytest.raises(ModelError, match=r"has ended in an error.*call opt\.zero_grad\(\)"):
            use()
    optimizer.zero_grad()
    model(**make_batches(1, seed=0)[0]).loss.backward()
    optimizer.step()
    reference_step(reference, 0)
    assert_same_masters(engine, reference)
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_did_not_arrive_are_fetched_again(device: str) -> None:
    model, reference, engine, _ = start(device)
    batch = make_batches(1)[0]
    fail_at(engine.lanes, "fetch", number=3)
    with torch.no_grad():
        with pytest.raises(OSError, match="no fetch"):
            model(**batch)
        assert_same_bits(model(**batch).logits, reference.model(**batch).logits, "logits")
    engine.close()


# -- other changes of the state ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("label", ["read ", "write "])
def test_state_lost_between_a_drive_and_an_update_poisons(
    label: str, device: str, drives: Tiers, tmp_path: Path
) -> None:
    _, _, engine, optimizer = start(device, tiers=drives)
    one_step(engine, optimizer, 0)
    fail_at(engine.lanes, label, number=4)  # reads are ahead of updates by their buffers
    with pytest.raises(OSError, match=f"no {label}"):
        one_step(engine, optimizer, 1)
    assert_poisoned(engine, optimizer, tmp_path, f"no {label}")


def test_a_commit_that_fails_leaves_a_whole_state(drives: Tiers) -> None:
    """It is told, and what is in memory is as good as before: it can be trained and saved."""
    _, reference, engine, optimizer = start("emulated", tiers=drives)
    one_step(engine, optimizer, 0)
    fail_at(engine.lanes, "commit")
    engine.commit(1, {})
    with pytest.raises(OSError, match="no commit"):
        engine.lanes.drain()
    one_step(engine, optimizer, 1)
    for seed in (0, 1):
        reference_step(reference, seed)
    assert_same_masters(engine, reference)
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_resident_block_that_did_not_come_home_poisons(device: str, tmp_path: Path) -> None:
    _, _, engine, optimizer = start(device, resident_layers=2)
    one_step(engine, optimizer, 0)
    fail_at(engine.lanes, "push", number=1)
    with pytest.raises(OSError, match="no push"):
        one_step(engine, optimizer, 1)
    assert_poisoned(engine, optimizer, tmp_path, "no push")


@pytest.mark.parametrize("device", DEVICES)
def test_a_resident_block_that_did_not_reach_the_device_is_sent_again(device: str) -> None:
    _, reference, engine, optimizer = start(device, resident_layers=2)
    fail_at(engine.lanes, "pull", number=1)
    with pytest.raises(OSError, match="no pull"):
        one_step(engine, optimizer, 0)
    one_step(engine, optimizer, 0)
    reference_step(reference, 0)
    assert_same_masters(engine, reference)
    engine.close()


def test_any_failure_that_cuts_off_updates_poisons(tmp_path: Path) -> None:
    """What is enqueued behind a failure never runs, so one in another lane leaves updates undone."""
    lanes = HeldLanes()
    _, _, engine, optimizer = start(lanes)
    lanes.may_go.clear()
    engine.forward_backward(make_batches(1, seed=0))
    optimizer.step()
    assert optimizer.steps["model.layers.3.mlp.up_proj.weight"] == 0
    fail_at(lanes, "fetch")
    threading.Timer(0.2, lanes.may_go.set).start()
    with pytest.raises(OSError, match="no fetch"):
        one_step(engine, optimizer, 1)
    assert_poisoned(engine, optimizer, tmp_path, "no fetch")
    assert len(set(optimizer.steps.values())) <= 2
