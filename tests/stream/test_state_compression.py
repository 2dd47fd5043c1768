"""`optim.state=bf16` and `int8`: not exact, but the same bits however a model streams, and fewer bytes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.optimizers import adamw
from megatrain.config.optimizers.optimizer import num_scales
from megatrain.config.optimizers.registry import find
from megatrain.errors import CapacityError, CheckpointError, ConfigError
from megatrain.layout import pools
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.totals import BlockTotals
from megatrain.model.profile.count import count_anatomy
from megatrain.optim import pool
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.memory.planned_blocks import list_blocks
from megatrain.stream.engine import Engine
from megatrain.stream.forward.arrangement import residency_of
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from megatrain.train.loop import train
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER
from tests.train.project import make_config, train_until
from tests.train.test_loop import rows_of, state_of

STATES = ("bf16", "int8")
BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0}


def train_steps(
    state: str, *, steps: int = 3, clip: float | None = 0.5, updates: str = "deferred", **settings: Any
) -> tuple[Engine, Any, list[float]]:
    """Train a tiny model, two micro-batches per step."""
    model = make_model(FAMILIES["llama_tied"]())
    engine = attach_plainly(model, **{"device": "checked", "precision": "bf16", "lockstep": 2, **settings})
    optimizer = engine.adamw(**HYPER, max_grad_norm=clip, updates=updates, state=state)
    losses = []
    for step in range(steps):
        losses.append(engine.forward_backward(make_batches(2, seed=step)).item())
        optimizer.step()
    return engine, optimizer, losses


def whole_state(engine: Engine) -> dict[str, Tensor]:
    """Copy masters and everything that AdamW keeps, by parameter: blocks may be cut differently."""
    state = dict(engine.named_masters())
    for block in engine.host.blocks:
        state |= {name: tensor.clone() for name, tensor in block.optimizer_tensors().items()}
    return state


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@every_value(precision=["fp32", "bf16"], state=list(STATES))
def test_no_way_of_streaming_changes_a_bit(state: str, precision: str) -> None:
    """Schedules, slots, fragments, residents that are updated on the device, lanes that are threads."""
    engine, _, losses = train_steps(state, steps=2, precision=precision, clip=None)
    expected = whole_state(engine)
    assert any(name.startswith("exp_avg_scale/") for name in expected) == (state == "int8")
    ways: list[dict[str, Any]] = [
        {"updates": "immediate"},
        {"updates": "serial", "num_slots": 1, "lockstep": 1},
        {"fragments": True, "resident_layers": 1},
        {"resident_layers": 4},
        {"device": "emulated", "resident_layers": 2, "lockstep": 2},
    ]
    for way in ways:
        engine, _, found = train_steps(state, steps=2, clip=None, **{"precision": precision, **way})
        assert found == losses, way
        assert_same_state(whole_state(engine), expected)


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    for state in STATES:
        found = []
        for num_threads in (1, 3):
            monkeypatch.setattr(pool, "_default_pool", pool.WorkerPool(num_threads))
            found.append(whole_state(train_steps(state, steps=2)[0]))
        assert_same_state(*found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("state", STATES)
def test_the_seed_rounds_otherwise(state: str) -> None:
    engine, _, _ = train_steps(state, steps=1)
    other = attach_plainly(make_model(FAMILIES["llama_tied"]()), device="checked", precision="bf16")
    optimizer = other.adamw(**HYPER, max_grad_norm=0.5, state=state, seed=1)
    other.forward_backward(make_batches(2, seed=0))
    optimizer.step()
    one, two = whole_state(engine), whole_state(other)
    for name, tensor in one.items():
        if not name.startswith("exp_avg"):
            assert torch.equal(tensor, two[name]), name
    assert any(not torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_compressed_runs_stay_near_fp32() -> None:
    """20 steps on one batch. Deviations were below 1 % of what the loss falls; a tenth is allowed."""
    finals, first = {}, 0.0
    for state in ("fp32", *STATES):
        engine, optimizer, _ = train_steps(state, steps=0, precision="fp32", device="cpu")
        losses = []
        for _ in range(20):
            losses.append(engine.forward_backward(make_batches(1, seed=0)).item())
            optimizer.step()
        first, finals[state] = losses[0], sum(losses[-3:]) / 3
    fall = first - finals["fp32"]
    assert fall > 1.0
    for state in STATES:
        assert finals[state] != finals["fp32"]
        assert abs(finals[state] - finals["fp32"]) < 0.1 * fall, finals


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("state", ["fp32", *STATES])
@pytest.mark.parametrize(("clip", "gradient"), [(None, 0), (0.5, 2)])
def test_host_bytes_are_those_of_the_table(state: str, clip: float | None, gradient: int) -> None:
    """2 + 2 bytes of weights, the moments, exactly their scales; 2 of gradients if clipping keeps them."""
    updates = "immediate" if clip is None else "deferred"
    engine, _, _ = train_steps(state, steps=1, clip=clip, updates=updates)
    layouts = engine.host.layouts
    num_state = sum(layout.num_state for layout in layouts)
    scales = sum(num_scales(entry.numel) for layout in layouts for entry in layout.trained)
    expected = (4 + BYTES[state] + gradient) * num_state + (8 * scales if state == "int8" else 0)
    staging = engine.host.arena("staging")
    assert engine.host_bytes - (staging.nbytes if staging else 0) == expected


def test_int8_takes_six_bytes_per_parameter_of_a_large_matrix() -> None:
    assert num_scales(4096 * 4096) == 4096 * 4096 // 256
    assert num_scales(1) == 1
    assert num_scales(257) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("state", STATES)
def test_updated_bytes_are_counted(state: str) -> None:
    """Whether `attach` knew of the format or not; residents are updated on the device and do not count."""
    reports = []
    ways: list[dict[str, Any]] = [{}, {"optimizer_state": state}]
    for settings in ways:
        engine, _, _ = train_steps(state, steps=1, **settings)
        reports.append(engine.last_step.update_bytes)
    num_state = sum(layout.num_state for layout in engine.host.layouts)
    scales = sum(num_scales(entry.numel) for layout in engine.host.layouts for entry in layout.trained)
    expected = (10 + 2 * BYTES[state]) * num_state + (16 * scales if state == "int8" else 0)
    assert reports == [expected, expected]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("state", ["fp32", *STATES])
def test_bytes_of_an_update_are_those_of_its_planes(state: str, precision: Any) -> None:
    """Planner and program say what the tensors are that AdamW reads, and writes but for the gradient."""
    engine, _, _ = train_steps(state, steps=1, precision=precision)
    moments = find("adamw", state)
    measured = []
    for block in engine.host.blocks:
        planes = [block.find_plane(name) for name in ("working", "remainder", *moments.planes)]
        changed = [plane for plane in planes if plane is not None]
        assert len(block.layout.trained) == len(block.layout.entries)
        assert block.gradient is not None
        measured.append(2 * sum(tensor.nbytes for tensor in changed) + block.gradient.nbytes)
    assert [size.update_bytes for size in engine.executor.spec.sizes] == measured
    config = FAMILIES["llama_tied"]()
    anatomy = count_anatomy(config, micro_batch_size=2, seq_len=16, precision=precision, device_type="cpu")
    blocks = list_blocks(anatomy, engine.choice, moments)
    assert [block.size.update_bytes for block in blocks] == measured
    selection = BlockSums.of(anatomy, engine.choice).residency(engine.choice).on_host
    assert selection.total(BlockBytes.update_bytes, moments) == sum(measured)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("state", ["fp32", *STATES])
def test_device_bytes_of_residents_are_as_planned(state: str) -> None:
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=1 << 30))
    engine, _, _ = train_steps(state, steps=1, device=lanes, resident_layers=4, optimizer_state=state)
    choice = engine.choice
    sizes = pools.device_pools(
        residency_of(engine.arrangement.binding.blocks, engine.host.layouts, engine.arrangement.residents),
        num_slots=choice.num_slots,
        num_gradient_buffers=choice.num_gradient_buffers,
        is_wide=False,
        waiting=BlockTotals(())[:],
        optimizer=engine.arrangement.binding.job.optimizer,
    )
    assert engine.device_bytes_peak == sum(sizes.values())


def test_memory_is_planned_for_the_format() -> None:
    """A limit between int8 and fp32 refuses the one and takes the other, before anything is allocated."""
    layouts = train_steps("fp32", steps=0)[0].host.layouts
    limit = 11 * sum(layout.num_state for layout in layouts)  # with gradients: 14, 10 and 8.03 bytes
    for state in STATES:
        assert train_steps(state, steps=1, optimizer_state=state, host_limit=limit)[0].host_bytes <= limit
    with pytest.raises(CapacityError, match=r"use optim.state=bf16 or int8 \(4 or 6 bytes .* not exact\)"):
        train_steps("fp32", host_limit=limit)


def test_a_state_without_memory_for_it_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"state is fp32, but memory was planned for int8.*optimizer_state='fp32'"
    ):
        train_steps("fp32", optimizer_state="int8")
    with pytest.raises(ConfigError, match="the optimizer's state is 'fp8'; use fp32, bf16 or int8"):
        train_steps("fp8")
    engine, optimizer, _ = train_steps("bf16", steps=0, optimizer_state="bf16")
    assert optimizer.kind == engine.host.optimizer == engine.arrangement.binding.job.optimizer == adamw.BF16


def test_a_model_may_be_attached_again_with_another_state() -> None:
    """Nothing of the first optimizer's planes is left."""
    model = make_model(FAMILIES["llama_tied"]())
    for state in ("int8", "fp32"):
        engine = attach_plainly(model, precision="bf16")
        optimizer = engine.adamw(**HYPER, state=state)
        engine.forward_backward(make_batches(1, seed=0))
        optimizer.step()
        num_state = sum(layout.num_state for layout in engine.host.layouts)
        assert engine.host_bytes == pytest.approx({"int8": 8.03, "fp32": 14}[state] * num_state, rel=1e-3)
        engine.detach()
        assert engine.host_bytes == 4 * num_state, "masters"


# -- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["int8", pytest.param("bf16", marks=pytest.mark.parity)])
def test_resume_equals_uninterrupted_run(state: str, tmp_path: Path) -> None:
    """With residents before, and fragments after the stop."""
    settings: dict[str, Any] = {
        "train": {"precision": "bf16", "steps": 6},
        "optim": {"state": state},
        "checkpoint": {"every": 2},
    }
    train(make_config(tmp_path, "whole", **settings))
    train_until(make_config(tmp_path, "parts", **settings, memory={"resident_blocks": 2}), 3)
    train(make_config(tmp_path, "parts", **settings, memory={"fragments": True}))
    for name in ("loss", "grad_norm", "lr"):
        assert [row[name] for row in rows_of(tmp_path / "parts")] == [
            row[name] for row in rows_of(tmp_path / "whole")
        ]
    states = [state_of(tmp_path / run) for run in ("parts", "whole")]
    found = [
        {name.split(":")[1]: tensor for name, tensor in tensors.items() if "state/" in name}
        for tensors in states
    ]
    assert_same_state(*found)
    dtypes = {name.split("/")[0].strip(): tensor.dtype for name, tensor in found[0].items()}
    kind = torch.bfloat16 if state == "bf16" else torch.uint8
    assert dtypes["exp_avg"] == dtypes["exp_avg_sq"] == kind
    assert ("exp_avg_scale" in dtypes) == (state == "int8")


def test_another_state_is_refused_on_resume(tmp_path: Path) -> None:
    train(make_config(tmp_path, train={"steps": 1}, optim={"state": "int8", "warmup_steps": 0}))
    for state in ("fp32", "bf16"):
        sentence = rf"trained with optim.state=int8, not {state}; use the same, or start a new run"
        with pytest.raises(CheckpointError, match=sentence):
            train(make_config(tmp_path, train={"steps": 2}, optim={"state": state, "warmup_steps": 0}))
    train(make_config(tmp_path, train={"steps": 2}, optim={"state": "int8", "warmup_steps": 0}))


def test_a_checkpoint_from_before_the_choice_is_fp32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its configuration has no `optim.state`."""
    from megatrain.train.resume.changes import report_changes

    config = make_config(tmp_path)
    saved = json.loads(json.dumps(config.model_dump(mode="json")))
    del saved["optim"]["state"]
    report_changes(config, {"config": saved})
    with pytest.raises(CheckpointError, match=r"optim\.state=fp32, not bf16"):
        report_changes(make_config(tmp_path, optim={"state": "bf16"}), {"config": saved})


def test_the_label_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path, train={"steps": 1}, optim={"state": "int8", "warmup_steps": 0}))
    assert "optimizer state: int8 (not exact)" in caplog.text
