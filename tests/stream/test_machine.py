"""Every device is described to the planner: by its name, or by the lanes that stand for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatrain.errors import ConfigError
from megatrain.hardware import HardwareSpec, host_memory, load_machine
from megatrain.stream.lanes import CheckedLanes, EmulatedLanes, EmulatedMachine, InlineLanes, Lanes
from megatrain.stream.machine import common_gpu, machine_of


@pytest.mark.parametrize("device", ["cpu", InlineLanes(), InlineLanes(1 << 20)])
def test_the_host_computes(device: str | Lanes) -> None:
    spec = machine_of(device, "bf16")
    assert spec.is_cpu
    assert spec.device_bytes is None
    assert spec.matmul_flops_per_s["bf16"] > 0
    assert spec.host_bytes == pytest.approx(host_memory().available_bytes, rel=0.1)
    assert spec.drives is None


@pytest.mark.parametrize("name", ["checked", "emulated"])
@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_a_device_for_tests_computes_at_this_computer_s_rates(name: str, limit: int | None) -> None:
    lanes = {"checked": CheckedLanes(limit), "emulated": EmulatedLanes(EmulatedMachine(device_bytes=limit))}
    by_name = machine_of(name, "fp32", device_limit=limit)
    for spec in (by_name, machine_of(lanes[name], "fp32")):
        assert (spec.device, spec.device_bytes, spec.is_cpu) == ("emulated", limit, False)
        assert spec.matmul_flops_per_s == by_name.matmul_flops_per_s
    lanes[name].close()


def test_rates_of_emulated_lanes_are_the_machine_s() -> None:
    machine = EmulatedMachine(h2d_bytes_per_s=3e9, d2h_bytes_per_s=2e9, compute_flops_per_s=1e12)
    lanes = EmulatedLanes(machine)
    spec = machine_of(lanes, "fp32")
    assert (spec.h2d_bytes_per_s, spec.d2h_bytes_per_s, spec.matmul_flops_per_s["fp32"]) == (3e9, 2e9, 1e12)
    lanes.close()


def test_what_was_measured_takes_the_place_of_assumptions() -> None:
    measured = replace(load_machine("cpu-laptop"), name="measured")

    def measure() -> HardwareSpec:
        return measured

    assert machine_of("cpu", "fp32", measure=measure) == replace(measured, drives=None)
    assert machine_of("emulated", "fp32", measure=measure).name == "emulated"


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_drives_are_those_that_the_run_names(device: str) -> None:
    drives = machine_of(device, "fp32", num_drives=3).drives
    assert drives is not None
    assert drives.num_drives == 3


def test_a_device_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="device is 'gpu', on which megatrain cannot run; use auto"):
        machine_of("gpu", "fp32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_has_its_own_memory_and_link() -> None:
    spec = common_gpu(torch.device("cuda", 0), "bf16")
    _, total = torch.cuda.mem_get_info()
    assert 0 < (spec.device_bytes or 0) <= total
    assert not spec.is_cpu
    assert 1e9 < spec.h2d_bytes_per_s < 1e12
    assert machine_of("cuda", "bf16").device == spec.device == torch.cuda.get_device_name(0)
