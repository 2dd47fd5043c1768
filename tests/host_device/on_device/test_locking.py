"""Host memory is page-locked before the first step, and the log says so where it takes long."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.config.choice import StepBatch
from megatrain.hardware.accelerators import VENDORS
from megatrain.store.arena import Arena
from megatrain.stream.lanes import AcceleratorLanes, accelerator
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER

host: Any = register()


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "recompute"},
        {"activations": "offload", "lockstep": 2},
        {"activations": "recompute", "lockstep": 1, "precision": "bf16"},
    ],
)
def test_no_step_allocates_or_locks_what_its_gradients_need(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = make_batches(2)
    rows, tokens = batches[0]["input_ids"].shape
    batch = StepBatch(micro_batch_size=rows, seq_len=tokens, num_micro_batches=2)
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=TYPE, batch=batch, **settings)
    optimizer = engine.adamw(**HYPER)
    made: list[int] = []
    ring = engine.arrangement.offloaded
    monkeypatch.setattr(Arena, "__init__", counted(Arena.__init__, made))
    engine.forward_backward(batches)
    optimizer.step()
    assert sum(made) == ring.host_bytes
    engine.detach()
    engine.lanes.close()


def test_memory_of_an_engine_that_nobody_closed_is_unlocked_before_it_is_unmapped() -> None:
    """What is mapped at the same address later would else be taken for locked, and copies go to old pages."""
    gc.collect()
    before = host.native.locked_bytes()
    engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=TYPE)
    optimizer = engine.adamw(**HYPER)
    engine.forward_backward(make_batches(1))
    optimizer.step()
    assert host.native.locked_bytes() > before
    del engine, optimizer
    until = time.monotonic() + 60
    while gc.collect() >= 0 and host.native.locked_bytes() > before and time.monotonic() < until:
        time.sleep(0.01)  # its threads are still at work
    assert host.native.locked_bytes() == before


def counted(make: Any, sizes: list[int]) -> Any:
    def init(arena: Arena, nbytes: int, *given: Any) -> None:
        sizes.append(nbytes)
        make(arena, nbytes, *given)

    return init


@pytest.mark.parametrize("is_slow", [False, True])
def test_locking_that_takes_long_is_said_while_it_lasts(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The slow one lasts until it has been said; the other one could be said in an hour."""
    heard: list[str] = []

    def lock(address: int, nbytes: int) -> bool:
        until = time.monotonic() + 60
        while is_slow and not caplog.messages and time.monotonic() < until:
            time.sleep(0.01)
        heard.extend(caplog.messages)
        return True

    vendor = replace(VENDORS[TYPE], lock=lock, unlock=lambda address: None)
    monkeypatch.setitem(VENDORS, TYPE, vendor)
    monkeypatch.setattr(accelerator, "SLOW_LOCK_S", 0.01 if is_slow else 3600.0)
    lanes = AcceleratorLanes(torch.device(TYPE))
    with caplog.at_level(logging.INFO, logger="megatrain"):
        lanes.lock(Arena(100 << 20))
    lanes.close()
    assert heard == ["page-locking 0.1 GiB of host memory"] * is_slow
