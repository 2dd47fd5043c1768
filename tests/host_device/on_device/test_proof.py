"""The proof of a machine runs on a device with streams, and finds a fault there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatrain.doctor.bench import run_bench
from megatrain.doctor.checks import Level
from megatrain.doctor.proof import CELLS, TINY, prove
from megatrain.hardware.spec import HardwareSpec
from megatrain.hardware.this_machine import Device, describe_machine
from megatrain.stream.lanes import AcceleratorLanes
from tests.doctor.test_bench import TINY as QUICK
from tests.host_device.device import TYPE, register

host = register()
DEVICE = torch.device(TYPE, 0)
SHAPE = replace(TINY, num_steps=2)


@pytest.fixture(scope="module")
def machine() -> HardwareSpec:
    bench = run_bench(DEVICE, None, QUICK)
    host.native.take_counts()  # it copies memory that is not locked, which other tests count
    device = Device(name="host memory", nbytes=1 << 30)
    return describe_machine(bench.rates, device=device, num_cores=1, path=None)


def test_every_cell_has_the_bits_of_the_resident_model(machine: HardwareSpec) -> None:
    proof = prove(DEVICE, machine, shape=SHAPE)
    assert proof.checks[0].level is Level.OK, proof.checks[0].text
    assert proof.cells.keys() == CELLS.keys()
    assert proof.step["planned_s"] > 0
    assert {"fetch", "compute", "offload", "host"} <= {lane for lane, *_ in proof.step["timeline"]}


def test_a_copy_that_is_left_out_is_found(machine: HardwareSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, left = AcceleratorLanes.copy, [60]

    def forgetful(lanes: AcceleratorLanes, target: torch.Tensor, source: torch.Tensor) -> None:
        left[0] -= 1
        if left[0]:
            copy(lanes, target, source)

    monkeypatch.setattr(AcceleratorLanes, "copy", forgetful)
    assert prove(DEVICE, machine, shape=SHAPE).checks[0].level is Level.FAIL
