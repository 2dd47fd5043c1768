"""A vendor for which torch cannot page-lock the state's memory: copies go through a ring of locked ones."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.hardware.accelerators import VENDORS
from megatrain.store.arena import Arena
from megatrain.stream import machine
from megatrain.stream.forward import passes
from megatrain.stream.lanes import AcceleratorLanes, locked_ring
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.host_device.on_device.test_device import hold
from tests.host_device.on_device.test_parity import ROWS, dawdle
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_backwards_add_up, check_parity, recorded, start
from tests.stream.test_speed_parity import row_name, settings_of

host = register()
DEVICE = torch.device(TYPE, 0)
STREAMED = next(row for row in ROWS if (row["activations"], row["resident_layers"]) == ("offload", 0))
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _cannot_lock(monkeypatch: Patch) -> None:
    """Registration off, and pieces so small that blocks are many; no norm of another cut of the layers."""
    recorded.cache_clear()
    host.native.take_counts()  # those of other tests
    monkeypatch.setitem(VENDORS, TYPE, replace(VENDORS[TYPE], lock=None, unlock=None))
    monkeypatch.setattr(locked_ring, "BUFFER_BYTES", 1024)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row is STREAMED else pytest.mark.parity) for row in ROWS],
    ids=row_name,
)
def test_copies_through_the_ring_change_no_bit(row: dict[str, Any]) -> None:
    dawdle(7)
    check_parity("llama_tied", **settings_of(row))
    assert "copy of unlocked memory" not in host.native.take_counts()


@pytest.mark.parity
def test_no_timing_changes_a_bit_of_copies_through_the_ring() -> None:
    for seed in range(40):
        dawdle(seed)
        check_parity("llama_tied", device=TYPE, activations="offload", resident_layers=1)


def test_bytes_pass_the_ring_both_ways_in_any_number() -> None:
    ring = locked_ring.LockedRing(DEVICE)
    host.native.delay(8, 0.5, 1e-3, 0.0)
    for numel in (0, 1, 255, 256, 257, 1024, 5000):
        source = torch.randn(numel).to(torch.bfloat16)
        there, back = torch.zeros(numel, device=DEVICE), torch.zeros(numel)
        ring.copy(there, source)
        expected = source.float()
        source.fill_(7)  # it has been read
        ring.copy(back, there)
        assert torch.equal(back, expected)


def test_what_is_still_to_come_is_converted_when_it_has_come(monkeypatch: Patch) -> None:
    monkeypatch.undo()
    lanes = AcceleratorLanes(DEVICE)
    arena = Arena(4096)
    lanes.lock(arena)
    here = arena.view(torch.bfloat16, 0, 256)
    source, target = torch.full((256,), 3.0, device=DEVICE).to(here.dtype), torch.zeros(256, device=DEVICE)
    torch.accelerator.synchronize()
    gate = hold(torch.accelerator.current_stream())
    lanes.copy(here, source)
    assert here.tolist() == [0] * 256
    threading.Timer(0.05, gate.set).start()
    lanes.copy(target, here)
    assert target.cpu().tolist() == [3] * 256
    lanes.close()


@pytest.mark.parity
@pytest.mark.parametrize("is_locked", [False, True])
def test_sums_that_are_loaded_in_another_dtype_have_arrived(is_locked: bool, monkeypatch: Patch) -> None:
    """A gradient in bf16 comes back as fp32: the host converts it, when it is there."""
    if is_locked:
        monkeypatch.undo()
    host.native.delay(9, 0.0, 0.0, 4e-3 if is_locked else 5e-4)
    _, reference, engine, optimizer = start("llama_tied", device=TYPE, precision="bf16")
    assert_backwards_add_up(engine, optimizer, reference, precision="bf16", reads=False)
    assert "copy of unlocked memory" not in host.native.take_counts()
    engine.lanes.close()


@pytest.mark.parametrize("direction", ["fetch", "offload"])
def test_a_buffer_used_before_its_copy_is_done_shows(direction: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(locked_ring, "until_done", lambda event: None)
    host.native.delay(1, 0.0, 0.0, 4e-3)
    ring = locked_ring.LockedRing(DEVICE)
    here, there = torch.arange(5000.0), torch.arange(5000.0, device=DEVICE) * 2
    torch.accelerator.synchronize()
    if direction == "fetch":
        ring.copy(there, here)
        assert not torch.equal(there.cpu(), torch.arange(5000.0))
    else:
        ring.copy(here, there)
        assert not torch.equal(here, torch.arange(5000.0) * 2)
    host.native.settle()


def test_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=TYPE, activations="offload")
        optimizer = engine.adamw(**HYPER)
        engine.forward_backward(make_batches(2))
        optimizer.step()
        engine.lanes.close()
    assert [message for message in caplog.messages if "lock" in message] == [
        "torch cannot page-lock the state's memory for test: copies go through 3 page-locked buffers of 4 "
        "MiB in each lane, and the host copies every byte once more"
    ]


def test_the_link_is_measured_through_the_ring(monkeypatch: Patch) -> None:
    """So the plan prices the host's own copy, but for the memory bandwidth that updates lose to it."""
    monkeypatch.setattr(machine, "_LINK_BYTES", 1 << 16)
    monkeypatch.setattr(machine, "measure_matmul_peak", lambda *_: 1e12)
    spec = machine.common_gpu(DEVICE, "fp32")
    counts = host.native.take_counts()
    assert "copy of unlocked memory" not in counts
    assert "copy" not in counts
    assert spec.sources["h2d_bytes_per_s"] == spec.sources["d2h_bytes_per_s"] == "measured"


@pytest.mark.parametrize("limit", [40, 39])
def test_small_inputs_are_copied_behind_the_host_and_embeddings_as_they_are(
    limit: int, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(passes, "_STAGED_BYTES", limit)
    ids = torch.arange(5)
    for _ in range(3):  # in the same memory, if the copy before is done
        ids = ids + 1
        assert passes.to_device({"ids": (ids,)}, DEVICE)["ids"][0].cpu().equal(ids)
    assert host.native.take_counts().get("copy of unlocked memory", 0) == (0 if limit == 40 else 3)


def test_refused_memory_goes_through_the_ring_too(monkeypatch: Patch) -> None:
    monkeypatch.undo()
    host.native.refuse_locks(True)
    try:
        check_parity("llama_tied", device=TYPE, activations="offload")
    finally:
        host.native.refuse_locks(False)
    assert "copy of unlocked memory" not in host.native.take_counts()


def test_blocks_on_the_device_alone_are_read_and_written_through_the_ring() -> None:
    """Their places in RAM are never locked, so that their memory can be given back."""
    check_parity("llama_tied", device=TYPE, resident_layers=2, mirror_resident=False)
    engine = attach_plainly(
        make_model(FAMILIES["llama_tied"]()), device=TYPE, resident_layers=4, mirror_resident=False
    )
    optimizer = engine.adamw(**HYPER)
    engine.forward_backward(make_batches(2))
    optimizer.step()
    engine.settle()
    host.native.take_counts()
    with engine.host.borrow(1, writes=True) as state:
        assert state.planes["exp_avg"].count_nonzero() > 0
        state.planes["exp_avg"].fill_(2.0)
    assert "copy of unlocked memory" not in host.native.take_counts()
    assert state.planes["exp_avg"].count_nonzero() == 0
    with engine.host.borrow(1) as state:
        assert torch.equal(state.planes["exp_avg"], torch.full_like(state.planes["exp_avg"], 2.0))
    engine.detach()
