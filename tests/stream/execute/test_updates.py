"""When blocks are updated: on a host so slow that a step's updates run inside the next one.

`serial` and the resident loop are the references; `deferred` and `immediate` must not be told from them by
the numbers, whatever is read, changed or saved right after `opt.step()`.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.checkpoint.load import verify
from megatrain.errors import ConfigError, ModelError, TornStateError
from megatrain.layout.host_buffers import padded
from megatrain.plan.program.kinds import Lane
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine, devices
from megatrain.train.loop import train
from megatrain.train.resume.state import read_state, write_state
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_gradients, assert_same_masters
from tests.train.project import make_config, train_until
from tests.train.test_loop import rows_of, state_of

UPDATES = ("deferred", "immediate", "serial")


def slow_host(seed: int = 0, **rates: Any) -> EmulatedLanes:
    """Make lanes whose host takes some 10 ms per update, which is longer than a visit."""
    return EmulatedLanes(EmulatedMachine(host_bytes_per_s=2e7, jitter_s=1e-3, seed=seed, **rates))


class HeldLanes(EmulatedLanes):
    """Lanes on which the first block's updates wait until they may go: those of a step are then to come."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Event()
        self.may_go.set()

    def _submit(self, lane: Lane, function: Callable[[], object], work: float, label: object) -> None:
        def held() -> None:
            self.may_go.wait()
            function()

        is_held = lane is Lane.HOST and str(label).split()[:2] == ["update", "b0"]
        super()._submit(lane, held if is_held else function, work, label)


def slow_start(
    updates: str = "deferred", *, family: str = "llama", clip: float | None = 0.5, **settings: Any
) -> tuple[PreTrainedModel, Resident, Engine, Any]:
    """Make a resident model, and a streamed one on a slow host."""
    model = make_model(FAMILIES[family]())
    reference = Resident(model, precision=settings.get("precision", "fp32"), **HYPER)
    engine = attach_plainly(model, **{"device": slow_host(), **settings})
    clip = None if updates == "immediate" else clip
    return model, reference, engine, engine.adamw(**HYPER, max_grad_norm=clip, updates=updates)


def one_step(engine: Engine, optimizer: Any, reference: Resident, seed: int, num: int = 1) -> Any:
    """Do a step in both; returns its statistics. Nothing of the streamed one is waited for but its norm."""
    batches = make_batches(num, seed=seed)
    expected = reference.forward_backward(batches)
    assert_same_bits(engine.forward_backward(batches), expected, f"loss of step {seed}")
    stats = optimizer.step()
    reference.step(stats.grad_norm, optimizer.max_grad_norm)
    return stats


def is_behind(optimizer: Any, step: int) -> bool:
    """Whether updates of the step are still to come: looks without waiting."""
    return min(optimizer.steps.values()) < step


def planes_of(engine: Engine) -> dict[str, Tensor]:
    """Copy every plane of the whole host state."""
    engine.sync()
    return {
        f"{plane} of block {number}": tensor.clone()
        for number, block in enumerate(engine.host.blocks)
        for plane in ("working", "remainder", "exp_avg", "exp_avg_sq")
        if (tensor := block.find_plane(plane)) is not None
    }


def assert_same_planes(engine: Engine, expected: dict[str, Tensor]) -> None:
    """Compare every byte of the state."""
    planes = planes_of(engine)
    assert planes.keys() == expected.keys()
    for name, plane in planes.items():
        assert torch.equal(plane, expected[name]), name


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("updates", UPDATES)
def test_a_rate_that_changes_every_step_is_that_of_the_step(updates: str, precision: str) -> None:
    """The scheduler sets the next rate while updates with the last one are still to come."""
    lanes = HeldLanes()
    _, reference, engine, optimizer = slow_start(updates, precision=precision, device=lanes)
    ours = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.3**step)
    theirs = torch.optim.lr_scheduler.LambdaLR(reference.optimizer, lambda step: 0.3**step)
    were_behind = []
    for step in range(4):
        engine.sync()
        if updates == "deferred":  # the others wait for their updates
            lanes.may_go.clear()
        one_step(engine, optimizer, reference, step)
        ours.step()
        theirs.step()
        for group in optimizer.param_groups[1:]:  # any other hyper-parameter alike
            group["weight_decay"] = reference.optimizer.param_groups[0]["weight_decay"] * 0.0
        were_behind.append(is_behind(optimizer, step + 1))
        lanes.may_go.set()
    # who has read the norm has waited for immediate updates, which were enqueued before it
    assert were_behind == [updates == "deferred"] * 4
    assert_same_masters(engine, reference)
    assert set(optimizer.steps.values()) == {4}
    engine.lanes.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("updates", UPDATES)
def test_bias_correction_counts_the_updates_of_each_parameter(updates: str) -> None:
    """A block without gradient in some steps, whose count is then behind that of the others."""
    model, reference, engine, optimizer = slow_start(updates)
    for step in range(4):
        for net in (model, reference.model):
            net.model.layers[2].requires_grad_(step % 2 == 0)
            net.lm_head.requires_grad_(step != 3)
        one_step(engine, optimizer, reference, step)
    assert_same_masters(engine, reference)
    counts = {name: count for name, count in optimizer.steps.items() if count != 4}
    assert counts.pop("lm_head.weight") == 3
    assert counts == {name: 2 for name in optimizer.steps if name.startswith("model.layers.2.")}
    engine.lanes.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("precision", "settings"), [("fp32", {}), ("bf16", {"resident_layers": 2})])
def test_skipped_steps_change_nothing_and_the_next_is_right(precision: str, settings: dict[str, Any]) -> None:
    """Statistics are read many steps later; serial is the reference, byte for byte."""
    found = {}
    for updates in ("serial", "deferred"):
        model = make_model(FAMILIES["llama_tied"]())
        engine = attach_plainly(model, device=slow_host(), precision=precision, **settings)
        optimizer = engine.adamw(**HYPER, max_grad_norm=0.5, updates=updates)
        all_stats = []
        for step, factor in enumerate([1.0, math.inf, 1.0, math.nan, math.inf, 1.0]):
            hook = model.lm_head.register_forward_hook(lambda _, __, logits, factor=factor: logits * factor)
            engine.forward_backward(make_batches(2, seed=step))
            all_stats.append(optimizer.step())
            hook.remove()
        norms = [stats.grad_norm for stats in all_stats]
        assert [stats.skipped for stats in all_stats] == [False, True, False, True, True, False]
        assert optimizer.num_skipped == 3
        planes = planes_of(engine)
        assert set(optimizer.steps.values()) == {3}
        found[updates] = [norm for norm in norms if math.isfinite(norm)], planes
        engine.lanes.close()
    assert found["serial"][0] == found["deferred"][0]
    assert len(found["serial"][0]) == 3
    for name, plane in found["serial"][1].items():
        assert torch.equal(plane, found["deferred"][1][name]), name


def test_a_count_of_skipped_steps_is_there_once_the_statistics_are() -> None:
    """The training loop puts it into the checkpoint right after it has read `skipped`."""
    model, _, engine, optimizer = slow_start()
    model.lm_head.register_forward_hook(lambda _, __, logits: logits * math.inf)
    for step in range(3):
        engine.forward_backward(make_batches(1, seed=step))
        assert optimizer.step().skipped
        assert optimizer.num_skipped == step + 1
    engine.lanes.close()


# -- reading right after the step ----------------------------------------------------------------------------


def read_masters(model: PreTrainedModel, engine: Engine, _: Path) -> dict[str, Tensor]:
    return dict(engine.named_masters())


def read_detached(model: PreTrainedModel, engine: Engine, _: Path) -> dict[str, Tensor]:
    engine.detach()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def read_synced(model: PreTrainedModel, engine: Engine, _: Path) -> dict[str, Tensor]:
    return planes_of(engine)


def read_saved_state(model: PreTrainedModel, engine: Engine, root: Path) -> dict[str, Tensor]:
    write_state(engine, root)
    for block in engine.host.blocks:
        for plane in map(block.find_plane, ("remainder", "exp_avg", "exp_avg_sq")):
            if plane is not None:
                plane.fill_(0)
    read_state(engine.host, root)
    return planes_of(engine)


def read_logits(model: PreTrainedModel, engine: Engine, _: Path) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"logits": model.eval()(**make_batches(1, seed=50)[0]).logits}


def read_generated(model: PreTrainedModel, engine: Engine, _: Path) -> dict[str, Tensor]:
    prompt = make_batches(1, tokens=5)[0]["input_ids"]
    return {"tokens": model.eval().generate(prompt, max_new_tokens=8, do_sample=False)}


READS = (read_masters, read_detached, read_synced, read_saved_state, read_logits, read_generated)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "streamed": ("deferred", {"precision": "bf16"}),
    "resident": ("deferred", {"precision": "bf16", "resident_layers": 4}),
    "immediate": ("immediate", {}),
}


@pytest.mark.sampled(3)
@every_value(read=list(READS), way=list(WAYS))
def test_what_is_read_right_after_a_step_is_whole(
    read: Callable[..., dict[str, Tensor]], way: str, tmp_path: Path
) -> None:
    """Masters, the detached model, planes, saved state, an evaluation and generated tokens."""
    updates, settings = WAYS[way]
    found = []
    held = HeldLanes()
    for chosen, lanes in ((updates, held), ("serial", "cpu")):
        (tmp_path / chosen).mkdir()
        model = make_model(FAMILIES["llama"]())
        engine = attach_plainly(model, device=lanes, **settings)
        optimizer = engine.adamw(**HYPER, max_grad_norm=None, updates=chosen)
        for step in range(2):
            engine.sync()
            if step == 1 and chosen != "serial":
                held.may_go.clear()
            engine.forward_backward(make_batches(1, seed=step))
            optimizer.step()
        if not settings.get("resident_layers"):
            assert is_behind(optimizer, 2) == (chosen != "serial")
        threading.Timer(0.01, held.may_go.set).start()
        found.append(read(model, engine, tmp_path / chosen))
        engine.detach()
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


@pytest.mark.parity
def test_a_run_on_a_slow_host_that_is_stopped_anywhere_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint after every step, taken while that step's updates are still to come."""
    sections: dict[str, Any] = {
        "train": {"steps": 6, "device": "emulated", "precision": "bf16"},
        "checkpoint": {"every": 1, "keep_last": 9},
    }
    sections["memory"] = {"lockstep": 1, "activations": "recompute", "resident_blocks": 0}
    train(make_config(tmp_path, "inline", **{**sections, "train": {**sections["train"], "device": "cpu"}}))
    slow = functools.partial(EmulatedMachine, host_bytes_per_s=2e7)
    monkeypatch.setattr(devices, "EmulatedMachine", slow)
    for last in (2, 3, 5, 6):
        train_until(make_config(tmp_path, "stopped", **sections), last)
    for step in range(1, 7):
        for run in ("inline", "stopped"):
            manifest = verify(next((tmp_path / run / "checkpoints").glob(f"step-*{step}")))
            assert manifest.meta["updates"] == step, f"{run}: the counts of step {step}"
    for key in ("loss", "grad_norm", "lr", "tokens"):
        left, right = ([row[key] for row in rows_of(tmp_path / run)] for run in ("inline", "stopped"))
        assert left == right, key
    expected, found = state_of(tmp_path / "inline"), state_of(tmp_path / "stopped")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


# -- immediate -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [{}, {"lockstep": 3}, {"fragments": True}, {"resident_layers": 2}])
def test_immediate_updates_need_no_gradient_in_every_block(settings: dict[str, Any]) -> None:
    model, reference, engine, optimizer = slow_start("immediate", precision="bf16", **settings)
    for step in range(3):
        for net in (model, reference.model):
            net.model.layers[step].requires_grad_(False)
        one_step(engine, optimizer, reference, step, num=3)
    assert_same_masters(engine, reference)
    engine.lanes.close()


def test_immediate_updates_begin_before_the_backward_has_ended() -> None:
    """The last layer is updated while the first one's backward is still to come."""
    model, _, engine, optimizer = slow_start("immediate", device="checked")
    counts = []

    def look(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            counts.append(sum(optimizer.steps.values()))

    model.model.layers[0].mlp.register_forward_pre_hook(look)
    engine.forward_backward(make_batches(1))
    per_layer = sum(1 for name in optimizer.steps if name.startswith("model.layers.3."))
    assert counts == [3 * per_layer]
    assert optimizer.step().grad_norm > 0


def test_immediate_is_refused_where_it_cannot_be_exact() -> None:
    model = make_model(FAMILIES["llama"]())
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked")
    with pytest.raises(
        ConfigError, match=r"updates=immediate cannot clip \(max_grad_norm is 1.0\).*use updates=deferred"
    ):
        engine.adamw(updates="immediate")
    with pytest.raises(ConfigError, match="updates is 'later'; use deferred, immediate or serial"):
        engine.adamw(updates="later")
    engine.forward_backward(make_batches(1))
    with pytest.raises(ConfigError, match="updates=immediate needs the optimizer before the first backward"):
        engine.adamw(updates="immediate", max_grad_norm=None)
    engine.zero_grad()
    optimizer = engine.adamw(**HYPER, updates="immediate", max_grad_norm=None)
    model(**make_batches(1)[0]).loss.backward()
    with pytest.raises(ModelError, match=r"a second backward before opt.step\(\): with updates=immediate"):
        model(**make_batches(1)[0]).loss.backward()
    with pytest.raises(
        ConfigError, match="with updates=immediate, gradients are used up as soon as they are"
    ):
        engine.named_gradients()
    reference.forward_backward(make_batches(1))
    reference.step(optimizer.step().grad_norm, None)
    for step in range(1, 3):
        one_step(engine, optimizer, reference, step, num=step)
    assert_same_masters(engine, reference)


def test_two_forwards_and_one_backward_wait_for_the_step_under_immediate() -> None:
    """A round that nobody foresaw: nothing is updated before both have passed."""
    model, reference, engine, optimizer = slow_start("immediate", device="checked")
    for step in range(2):
        first, second = make_batches(2, seed=step)
        (model(**first).loss + model(**second).loss).backward()
        reference.model.zero_grad()
        (reference.model(**first).loss + reference.model(**second).loss).backward()
        reference.sums = {name: p.grad.clone() for name, p in reference.parameters.items()}
        optimizer.step()
        reference.step(0.0, None)
    assert_same_masters(engine, reference)


def test_layers_dropped_by_chance_are_exact_or_refused_under_immediate() -> None:
    config = FAMILIES["opt"]()
    config.layerdrop = 0.4
    model = make_model(config)
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked")
    optimizer = engine.adamw(**HYPER, max_grad_norm=None, updates="immediate")
    for step in range(4):
        seeds = [step]
        expected = reference.forward_backward(make_batches(1, seed=step), seeds)
        loss = engine.forward_backward(make_batches(1, seed=step), seeds=seeds)
        assert_same_bits(loss, expected, f"loss of step {step}")
        reference.step(optimizer.step().grad_norm, None)
    assert_same_masters(engine, reference)


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("updates", "clip", "per_parameter"),
    [("immediate", None, 12), ("deferred", 1.0, 14), ("serial", 1.0, 14), ("deferred", None, 14)],
)
@pytest.mark.parametrize("lockstep", [1, 4])
def test_host_bytes_per_parameter(
    updates: str, clip: float | None, per_parameter: int, lockstep: int
) -> None:
    """What is held is measured after two steps: no plane came by surprise."""
    engine = attach_plainly(
        make_model(FAMILIES["llama"]()), device="checked", precision="bf16", lockstep=lockstep
    )
    optimizer = engine.adamw(max_grad_norm=clip, updates=updates)
    for step in range(2):
        engine.forward_backward(make_batches(lockstep, seed=step))
        optimizer.step()
    num_state = sum(layout.num_state for layout in engine.host.layouts)
    staging = 3 * padded(max(layout.gradient_bytes for layout in engine.host.layouts))
    expected = per_parameter * num_state + (staging if updates == "immediate" else 0)
    assert engine.host_bytes == expected
    assert (engine.host.arena("gradient") is None) == (updates == "immediate")
    assert engine.host.arena("accumulator") is None


# -- failures ------------------------------------------------------------------------------------------------


class Broken(Exception):
    """Raised in a lane."""


@pytest.mark.parametrize("place", ["offload", "norm", "update"])
def test_a_failure_in_the_background_is_told_and_nothing_waits_for_ever(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that fails after `opt.step()` has returned; the statistics never come."""
    lanes = EmulatedLanes(EmulatedMachine(d2h_bytes_per_s=2e6))
    _, _, engine, optimizer = slow_start(device=lanes)

    def fail(*_: Any) -> None:
        raise Broken

    engine.forward_backward(make_batches(1))
    if place == "offload":  # the copies to come find nothing to sum with
        monkeypatch.setattr(engine.arrangement.gradients.shared, "_lanes", None)
    elif place == "norm":
        monkeypatch.setattr("megatrain.stream.optimizer.global_norm", fail)
    else:
        monkeypatch.setattr("megatrain.stream.execute.updates.clip_coefficient", fail)
    stats = None
    with pytest.raises((Broken, AttributeError)):  # noqa: PT012  # in step, or in whatever comes next
        stats = optimizer.step()
        if place != "update":
            _ = stats.grad_norm
        engine.sync()
    if stats is not None and place != "update":  # the failure has been told, and still there is no norm
        with pytest.raises(ModelError if place == "offload" else Broken):
            _ = stats.grad_norm
    if place == "update":  # one has begun
        with pytest.raises(TornStateError, match=r"Broken.*torn"):
            engine.sync()
    else:
        engine.sync()


def test_gradients_of_a_deferred_step_are_not_the_next_one_s() -> None:
    """zero_grad right after step() drops nothing that waits for its update; new gradients wait for it."""
    _, reference, engine, optimizer = slow_start()
    for step in range(3):
        one_step(engine, optimizer, reference, step)
        optimizer.zero_grad()
        engine.zero_grad()
    batch = make_batches(2, seed=7)
    expected = reference.forward_backward(batch)
    assert_same_bits(engine.forward_backward(batch), expected, "loss")
    assert_same_gradients(engine, reference.sums)
    assert_same_masters(engine, reference)
    engine.lanes.close()
