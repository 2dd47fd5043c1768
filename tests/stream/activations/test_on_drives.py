"""Saved activations that wait on drives: the same bits, a few host buffers, and nothing left behind."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config import build_config
from megatrain.config.choice import StepBatch
from megatrain.config.optimizers import adamw
from megatrain.errors import CapacityError, CheckpointError, ConfigError
from megatrain.layout.host_buffers import NUM_ACTIVATION_STAGING, SCRATCH_CHUNK_BYTES
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.memory.device_pools import host_planes
from megatrain.plan.memory.host_pools import drive_pools
from megatrain.plan.program.kinds import Lane
from megatrain.store.drives import system as calls
from megatrain.store.drives.scratch import Place, ScratchFiles
from megatrain.store.placement import Tiers
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import (
    Cause,
    CheckedLanes,
    EmulatedLanes,
    InlineLanes,
    OrderingError,
)
from tests.families import FAMILIES
from tests.products import every_pair, every_value
from tests.reference import attach_plainly, make_batches, make_model
from tests.store.disks import Counted
from tests.stream.lanes.test_lanes import CountingLanes, ForgetfulLanes
from tests.stream.runs import HYPER, assert_same_masters, assert_same_steps, start


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "system", Counted())


def tiers_in(root: Path, *, num_drives: int = 1, ram: int = 1 << 30) -> Tiers:
    return Tiers(nvme=tuple(root / f"drive{number}" for number in range(num_drives)), ram=ram)


def scratch_of(engine: Engine) -> ScratchFiles:
    assert engine.arrangement.scratch is not None
    return engine.arrangement.scratch


def begin(root: Path, *, num_drives: int = 1, **settings: Any) -> tuple[Any, Any, Engine, Any]:
    """Make a resident and a streamed run whose smallest tensors go to drives, in chunks of two pages."""
    tiers = tiers_in(root, num_drives=num_drives, ram=settings.pop("ram", 1 << 30))
    model, reference, engine, optimizer = start(**{"boundaries": "nvme", "tiers": tiers, **settings})
    shrink(engine)
    return model, reference, engine, optimizer


def shrink(engine: Engine) -> None:
    engine.arrangement.offloaded._min_bytes = 1
    scratch_of(engine).chunk_bytes = 8192


@pytest.mark.sampled(4)
@every_pair(
    activations=["recompute", "recompute_cheap", "offload", "drop_boundary"],
    num_micro_batches=[1, 3],
    device=["cpu", "checked", "emulated"],
)
def test_activations_on_drives_change_no_bit(
    device: str, num_micro_batches: int, activations: str, tmp_path: Path
) -> None:
    _, reference, engine, optimizer = begin(
        tmp_path,
        num_drives=2,
        device=device,
        activations=activations,
        lockstep=num_micro_batches,
        num_micro_batches=num_micro_batches,
    )
    assert_same_steps(engine, optimizer, reference, num_micro_batches=num_micro_batches)
    read, written = engine.arrangement.offloaded.drive_bytes
    assert written > 0
    assert read > 0 or (activations == "drop_boundary" and num_micro_batches == 1), "it is wanted at once"
    engine.detach()


MIXED = ["keep", "drop_boundary", "offload", "recompute"]
SETTINGS: dict[str, dict[str, Any]] = {
    "several rounds": {"num_micro_batches": 5, "lockstep": 2},
    "fragments": {"fragments": True, "num_slots": 3, "num_micro_batches": 2, "lockstep": 2},
    "one slot": {"num_slots": 1, "activations": "offload"},
    "state on drives too": {"ram": 700_000, "num_micro_batches": 2, "lockstep": 2},
    "immediate": {"updates": "immediate", "max_grad_norm": None, "ram": 700_000},
    "mixed": {"activations": MIXED, "num_micro_batches": 3, "lockstep": 3},
}


@pytest.mark.sampled(3)
@every_value(name=list(SETTINGS), precision=["fp32", "bf16"])
def test_every_way_of_streaming_gives_the_bits_of_boundaries_on_the_device(
    name: str, precision: str, tmp_path: Path
) -> None:
    settings = {"config": FAMILIES["llama_tied"](), "precision": precision, **SETTINGS[name]}
    activations = settings.get("activations", "recompute")
    settings["config"].num_hidden_layers = 4
    count = settings.get("num_micro_batches", 1)
    found: list[tuple[list[float], dict[str, Tensor]]] = []
    for boundaries in ("device", "nvme"):
        root = tmp_path / boundaries
        root.mkdir()
        _, _, engine, optimizer = begin(root, boundaries=boundaries, device="emulated", **settings)
        losses = []
        for step in range(2):
            batches = make_batches(count, seed=step)
            losses.append(float(engine.forward_backward(batches, seeds=list(range(count)))))
            optimizer.step()
        found.append((losses, dict(engine.named_masters())))
        assert bool(engine.choice.tiers) == (settings.get("ram") is not None)
        there = boundaries == "nvme" or activations in ("offload", MIXED)
        assert (engine.arrangement.offloaded.saved_bytes > 0) == there
        assert (engine.arrangement.offloaded.drive_bytes != (0, 0)) == (boundaries == "nvme")
        engine.detach()
    assert found[0][0] == found[1][0]
    for key, value in found[0][1].items():
        assert value.equal(found[1][1][key]), key


def test_a_boundary_is_written_once_and_read_once(tmp_path: Path) -> None:
    """All but the last layer's; and the newest is still on the device when it is wanted."""
    config = FAMILIES["llama_tied"]()
    config.num_hidden_layers = 6
    _, reference, engine, optimizer = begin(tmp_path, config=config, num_micro_batches=2, lockstep=2)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    offloaded = engine.arrangement.offloaded
    size = offloaded.host_bytes // NUM_ACTIVATION_STAGING
    assert size % 4096 == 0
    assert offloaded.drive_bytes == (2 * (2 * 5 - 1) * size, 2 * 2 * 5 * size)
    report = engine.last_step
    assert report.drive_write_bytes >= 2 * 5 * size
    assert scratch_of(engine).nbytes == 2 * 5 * -(-size // 8192) * 8192
    assert not offloaded._visits
    engine.detach()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("activations", ["recompute", "offload"])
@pytest.mark.parametrize("count", [1, 3])
def test_bytes_are_those_of_the_plan(count: int, activations: str, tmp_path: Path) -> None:
    config = FAMILIES["llama_tied"]()
    config.num_hidden_layers, config.hidden_size = 5, 256
    anatomy = count_anatomy(config, micro_batch_size=2, seq_len=64, precision="bf16")
    engine = attach_plainly(
        make_model(config),
        precision="bf16",
        activations=activations,
        boundaries="nvme",
        lockstep=count,
        num_micro_batches=count,
        tiers=tiers_in(tmp_path, num_drives=2),
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    engine.forward_backward(make_batches(count, rows=2, tokens=64))
    optimizer.step()
    batch = StepBatch(micro_batch_size=2, seq_len=64, num_micro_batches=count)
    planes = host_planes(anatomy, engine.choice, batch)
    assert engine.choice.boundaries == "nvme"
    assert planes["staging of activations"] == engine.arrangement.offloaded.host_bytes > 0
    pools = {pool.name: pool.nbytes for pool in drive_pools(anatomy, engine.choice, batch, adamw.FP32)}
    assert pools["saved activations"] == scratch_of(engine).nbytes == 4 * count * SCRATCH_CHUNK_BYTES
    engine.detach()


def test_longer_sequences_make_larger_buffers(tmp_path: Path) -> None:
    _, reference, engine, optimizer = begin(tmp_path, device="emulated")
    sizes = []
    for step, tokens in enumerate((8, 24, 16)):
        batches = make_batches(1, seed=step, tokens=tokens)
        engine.forward_backward(batches, seeds=[step])
        reference.forward_backward(batches, [step])
        reference.step(optimizer.step().grad_norm, 0.5)
        assert_same_masters(engine, reference)
        sizes.append(engine.arrangement.offloaded.host_bytes)
    assert sizes[0] <= sizes[1] == sizes[2]
    engine.detach()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activations", ["recompute", "offload", "drop_boundary"])
def test_two_forwards_and_one_backward_are_exact(activations: str, tmp_path: Path) -> None:
    """No program foresees them: what a backward wants is read when it asks, whatever was read ahead."""
    config = FAMILIES["llama"]()
    config.num_hidden_layers = 6
    model, reference, engine, optimizer = begin(tmp_path, config=config, activations=activations)
    for step in range(2):
        first, second = make_batches(2, seed=step)
        for net in (model, reference.model):
            (net(**first).loss + 2 * net(**second).loss).backward()
        for name, gradient in engine.named_gradients():
            torch.testing.assert_close(gradient, reference.parameters[name].grad, rtol=1e-5, atol=1e-7)
        assert not engine.arrangement.offloaded._visits
        engine.zero_grad()
        reference.model.zero_grad()
    with torch.no_grad():
        model(**first)
    model(**first)  # no backward follows: its room is for others
    reference.sums.clear()
    assert_same_steps(engine, optimizer, reference, first=3)
    engine.detach()


def test_an_engine_can_change_where_boundaries_wait(tmp_path: Path) -> None:
    _, reference, engine, optimizer = begin(tmp_path, boundaries="host", device="emulated")
    for first, boundaries in enumerate(("nvme", "device", "nvme", "host")):
        engine.reconfigure(replace(engine.choice, boundaries=boundaries))
        shrink(engine)
        assert engine.choice.boundaries == boundaries
        assert_same_steps(engine, optimizer, reference, first=first, steps=1)
        assert (engine.arrangement.offloaded.host_bytes > 0) == (boundaries != "device")
        assert (scratch_of(engine).nbytes > 0) == (boundaries == "nvme")
    engine.detach()


# -- order ---------------------------------------------------------------------------------------------------

MISSING_WAITS = {
    "saved, before it is written": Cause(Lane.STOW, Lane.SAVE, "offloaded"),
    "written, before the buffer is filled again": Cause(Lane.SAVE, Lane.STOW, "offloaded"),
    "written, before the buffer is read into": Cause(Lane.RECALL, Lane.STOW, "offloaded"),
    "written, before it is read": Cause(Lane.RECALL, Lane.STOW, "scratch"),
    "read, before it is restored": Cause(Lane.RESTORE, Lane.RECALL, "offloaded"),
    "restored, before the buffer is read into": Cause(Lane.RECALL, Lane.RESTORE, "offloaded"),
}
"""Not in the list: that a buffer is filled, or room written, again after it was restored or read. Both follow
from the others and compute's: what has been restored was computed with before anything is saved again."""


def train_in(lanes: CheckedLanes, root: Path) -> None:
    """Run a real training of two steps, each of two rounds, of which all boundaries pass the buffers."""
    config = FAMILIES["llama_tied"]()
    config.num_hidden_layers = 8
    engine = attach_plainly(make_model(config), device=lanes, boundaries="nvme", tiers=tiers_in(root))
    shrink(engine)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    try:
        for step in range(2):
            engine.forward_backward(make_batches(2, seed=step))
            optimizer.step()
    finally:
        engine.close()


@pytest.mark.parametrize("name", MISSING_WAITS)
def test_a_missing_wait_is_found(name: str, tmp_path: Path) -> None:
    cause = MISSING_WAITS[name]
    lanes = ForgetfulLanes(cause)
    with pytest.raises(OrderingError, match=f"lane {cause.waiting.value} uses {cause.buffer} "):
        train_in(lanes, tmp_path)
    assert lanes.num_forgotten > 0


def test_the_order_is_sound(tmp_path: Path) -> None:
    lanes = CountingLanes()
    train_in(lanes, tmp_path)
    assert set(MISSING_WAITS.values()) <= lanes.causes


class HastyLanes(EmulatedLanes):
    """Lanes of which RESTORE does not wait for RECALL."""

    def _wait(self, lane: Lane, event: Any, cause: Cause) -> None:
        if cause != Cause(Lane.RESTORE, Lane.RECALL, "offloaded"):
            super()._wait(lane, event, cause)

    def __init__(self, restored: threading.Event) -> None:
        self._restored = restored
        super().__init__()

    def _submit(self, lane: Lane, function: Callable[[], object], work: float, label: object) -> None:
        def restore() -> None:
            function()
            self._restored.set()

        super()._submit(lane, restore if lane is Lane.RESTORE else function, work, label)


def slow_down(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """Let every read of the drives begin after a wait."""
    read = ScratchFiles.read

    def slowly(self: ScratchFiles, place: Place, buffer: Tensor, what: str) -> None:
        wait()
        read(self, place, buffer, what)

    monkeypatch.setattr(ScratchFiles, "read", slowly)


@pytest.mark.parametrize("is_hasty", [False, True])
def test_a_visit_is_restored_when_its_read_is_complete(
    is_hasty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the drive is; what is restored sooner is what the buffer held before."""
    restored = threading.Event()
    slow_down(monkeypatch, restored.wait if is_hasty else lambda: time.sleep(0.005))
    config = FAMILIES["llama_tied"]()
    config.num_hidden_layers = 8
    lanes = HastyLanes(restored) if is_hasty else EmulatedLanes()
    _, reference, engine, optimizer = begin(tmp_path, device=lanes, config=config)
    if is_hasty:
        with pytest.raises(AssertionError):
            assert_same_steps(engine, optimizer, reference)
    else:
        assert_same_steps(engine, optimizer, reference)
    engine.detach()


def test_reads_run_two_visits_ahead(tmp_path: Path) -> None:
    """Where every operation runs when it is enqueued, the order of spans is that of launches."""
    config = FAMILIES["llama_tied"]()
    config.num_hidden_layers = 10
    lanes = InlineLanes()
    _, _, engine, _ = begin(tmp_path, device=lanes, config=config)
    engine.forward_backward(make_batches(1, seed=0))
    labels = [span.label for span in sorted(lanes.take_record().spans, key=lambda span: span.start_s)]
    places = {
        kind: [place for place, label in enumerate(labels) if label.startswith(kind)]
        for kind in ("recall", "restore", "backward")
    }
    assert len(places["recall"]) == len(places["restore"]) == 8  # layer 8's is still on the device
    for number in range(8):
        # the k-th backward is of layer 9 - k, and what is read as number n is of layer 7 - n
        read, restored = places["recall"][number], places["restore"][number]
        assert read < places["backward"][max(0, number - 1)], f"read {number} is not two visits ahead"
        assert read < restored < places["backward"][number + 1], "not one visit ahead"
    engine.detach()


# -- what goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_flipped_bit_stops_the_step_and_is_named(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FAMILIES["llama_tied"]()
    config.num_hidden_layers = 5
    _, reference, engine, optimizer = begin(tmp_path, config=config, device=device)
    write = ScratchFiles.write
    numbers: list[int] = []

    def spoil(self: ScratchFiles, place: Place, buffer: Tensor) -> None:
        write(self, place, buffer)
        numbers.append(place.chunks[0])
        if len(numbers) == 2:
            drive = self._drives[0]
            offset = place.chunks[0] * self.chunk_bytes + 100
            value = calls.system.preadv(drive._buffered, [memory := memoryview(bytearray(1))], offset)
            assert value == 1
            calls.system.pwritev(drive._buffered, [memoryview(bytes([memory[0] ^ 4]))], offset)

    batches = make_batches(1, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(ScratchFiles, "write", spoil)
        message = (
            r"scratch-0\.bin is damaged: chunk 0 of what was saved of block \d in micro-batch 0 .*not what"
        )
        with pytest.raises(CheckpointError, match=message):  # noqa: PT012
            engine.forward_backward(batches)
            engine.lanes.drain()
    assert len(numbers) == 4
    assert_same_steps(engine, optimizer, reference)
    engine.detach()


@pytest.mark.parametrize("call", ["fallocate", "pwritev"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_full_drive_stops_the_step_and_is_named(
    device: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is dropped; when there is room again, training goes on to the same bits."""
    _, reference, engine, optimizer = begin(tmp_path, device=device)
    broken = Counted()

    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broken, call, fail)
        patch.setattr(calls, "system", broken)
        verb = "take .* for" if call == "fallocate" else "write"
        message = rf"cannot {verb} .*scratch-0\.bin: No space left on device; free"
        with pytest.raises(CapacityError, match=message):  # noqa: PT012
            engine.forward_backward(make_batches(1, seed=0))
            engine.lanes.drain()
    assert_same_steps(engine, optimizer, reference)
    engine.detach()


def test_buffers_that_ram_has_no_room_for_are_refused(tmp_path: Path) -> None:
    _, _, engine, _ = begin(tmp_path)
    staging = engine.arrangement.offloaded._staging
    assert staging is not None
    staging._limit = 1000
    with pytest.raises(
        CapacityError, match=r"saved activations pass 3 buffers .* use memory\.boundaries=device"
    ):
        engine.forward_backward(make_batches(1, seed=0))
    engine.close()


def test_no_end_of_a_run_leaves_scratch(tmp_path: Path) -> None:
    """The files have no names while they are used; one that a kill has left before is taken over."""
    directory = tmp_path / "drive0"
    directory.mkdir()
    (directory / "scratch-0.bin").write_bytes(b"left by a run that was killed" * 1000)
    _, _, engine, optimizer = begin(tmp_path)
    engine.forward_backward(make_batches(1, seed=0))
    optimizer.step()
    assert scratch_of(engine).nbytes > 0
    assert {path.name for path in directory.iterdir()} == {"state.bin"}
    descriptor = scratch_of(engine)._drives[0]._buffered
    engine.close()
    assert {path.name for path in directory.iterdir()} == {"state.bin"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        calls.system.preadv(descriptor, [memoryview(bytearray(1))], 0)


def test_drives_are_needed(tmp_path: Path) -> None:
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "memory": {"boundaries": "nvme"}}
    with pytest.raises(
        ConfigError, match=r"memory\.boundaries is nvme, but memory\.tiers names no drives; add"
    ):
        build_config(raw)
    raw["memory"]["tiers"] = {"nvme": [str(tmp_path)]}
    assert build_config(raw).memory.boundaries == "nvme"
    model = make_model(FAMILIES["llama"]())
    with pytest.raises(ConfigError, match="boundaries is nvme, but there are no drives; name a directory"):
        attach_plainly(model, boundaries="nvme")
    with pytest.raises(ConfigError, match="boundaries is 'disk'; use device, host, nvme"):
        attach_plainly(model, boundaries="disk")
    engine = attach_plainly(model)
    with pytest.raises(ConfigError, match="boundaries is nvme, but there are no drives; name a directory"):
        engine.reconfigure(replace(engine.choice, boundaries="nvme"))
    engine.close()
