"""Resident blocks updated by the Triton kernel, in its interpreter, on the test device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from megatrain.hardware.accelerators import VENDORS
from megatrain.optim.adamw import fused
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.host_device.on_device.resident import ResidentOnDevice
from tests.optim.interpreter import interpreted
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_masters

register()


@pytest.fixture
def numels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Elements of each range that the kernel updates, on a device that has it."""
    found: list[int] = []
    kernel = fused.update_fused

    def update(ranges: Any) -> None:
        listed = list(ranges)
        found.extend(planes.working.numel() for _, planes in listed)
        kernel(listed, 64)

    monkeypatch.setitem(VENDORS, TYPE, dataclasses.replace(VENDORS[TYPE], triton={}))
    fused.why_not_fused.cache_clear()
    with interpreted():
        assert fused.why_not_fused(TYPE) is None  # the trial, which is not to be counted
        monkeypatch.setattr(fused, "update_fused", update)
        yield found
    fused.why_not_fused.cache_clear()


def test_resident_layers_equal_the_reference_loop(numels: list[int]) -> None:
    model = make_model(FAMILIES["llama_tied"]())
    reference = ResidentOnDevice(model, precision="bf16", **HYPER)
    engine = attach_plainly(model, device=TYPE, precision="bf16", lockstep=2, resident_layers=2)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    for step in range(2):
        batches = make_batches(2, seed=step)
        reference.forward_backward(batches, [1, 2])
        engine.forward_backward(batches, seeds=[1, 2])
        reference.step(optimizer.step().grad_norm, 0.5)
    assert_same_masters(engine, reference)
    layouts = engine.host.layouts[:2]
    assert sum(numels) == 2 * sum(layout.num_state for layout in layouts)
    engine.lanes.close()
