"""Chooses the lanes for a device by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from megatrain.errors import ConfigError
from megatrain.hardware.accelerators import accelerator, check_accelerator
from megatrain.hardware.memory import unmap_freed_tensors
from megatrain.stream.lanes import (
    AcceleratorLanes,
    CheckedLanes,
    EmulatedLanes,
    EmulatedMachine,
    InlineLanes,
    Lanes,
)

_EMULATED = "emulated:"
_LARGEST = 1e30
"""No rate is larger, and arithmetic with it does not overflow."""


def make_lanes(device: str | torch.device | Lanes, device_limit: int | None = None) -> Lanes:
    """Choose a backend by name, as `check_device` knows them, or take the lanes that the caller has made.

    Raises:
        ConfigError: An unknown device, one that is not there, or a file that describes no machine.
    """
    if isinstance(device, Lanes):
        return device
    name = check_device(str(device))
    if name == "cpu":
        unmap_freed_tensors()  # a device is a part of host memory, which malloc gives out
        return InlineLanes(device_limit)
    if name == "checked":
        return CheckedLanes(device_limit)
    if name == "emulated":
        return EmulatedLanes(EmulatedMachine(device_bytes=device_limit))
    if name.startswith(_EMULATED):
        machine = read_machine(name.removeprefix(_EMULATED))
        return EmulatedLanes(machine if device_limit is None else replace(machine, device_bytes=device_limit))
    return AcceleratorLanes(compute_device(name), device_limit)


def read_machine(path: str) -> EmulatedMachine:
    """Read the rates of an emulated machine from a JSON object, as `EmulatedMachine.from_rates` wants them.

    Raises:
        ConfigError: The file cannot be read, lacks a rate, or has one that is not positive.
    """
    try:
        rates = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the emulated machine ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: the emulated machine is no JSON ({error})") from error
    if not isinstance(rates, dict):
        raise ConfigError(f"{path}: the emulated machine must be a JSON object of rates, not {rates!r:.40}")
    for name in (*EmulatedMachine.RATES, "device_bytes"):
        value = rates.get(name, 1)  # what is missing is refused below
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LARGEST:
            raise ConfigError(f"{path}: {name} of the emulated machine is {value!r}; use a positive number")
    try:
        return EmulatedMachine.from_rates(rates)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def compute_device(name: str) -> torch.device:
    """Return where the tensors of a device of that name are; emulated ones are on the CPU.

    Raises:
        ConfigError: The device is refused, as by `check_device`.
    """
    name = check_device(name)
    return torch.device("cpu") if _is_cpu(name) else check_accelerator(name)


def check_device(name: str) -> str:
    """Return the device that `name` stands for: `auto` is the accelerator of this computer, else the CPU.

    Others are `cpu`, `cuda`, `cuda:1`, `xpu`, `checked`, `emulated`, and `emulated:FILE` with the rates of a
    file.

    Raises:
        ConfigError: An unknown device, one that is not there, or a file that describes no machine.
    """
    if name == "auto":
        return accelerator() or "cpu"
    if name.startswith(_EMULATED):
        read_machine(name.removeprefix(_EMULATED))
    elif not _is_cpu(name):
        check_accelerator(name)
    return name


def _is_cpu(name: str) -> bool:
    return name in ("cpu", "checked", "emulated") or name.startswith(_EMULATED)
