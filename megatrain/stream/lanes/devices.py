"""Chooses the lanes for a device by its name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import torch

from megatrain.errors import ConfigError
from megatrain.stream.lanes import CheckedLanes, CudaLanes, EmulatedLanes, EmulatedMachine, InlineLanes, Lanes

_EMULATED = "emulated:"


def make_lanes(device: str | torch.device | Lanes, device_limit: int | None = None) -> Lanes:
    """Choose a backend by name, as `check_device` knows them, or take the lanes that the caller has made.

    Raises:
        ConfigError: An unknown device, CUDA where there is none, or a file that describes no machine.
    """
    if isinstance(device, Lanes):
        return device
    name = check_device(str(device))
    if name == "cpu":
        return InlineLanes(device_limit)
    if name == "checked":
        return CheckedLanes(device_limit)
    if name == "emulated":
        return EmulatedLanes(EmulatedMachine(device_bytes=device_limit))
    if name.startswith(_EMULATED):
        machine = read_machine(name.removeprefix(_EMULATED))
        return EmulatedLanes(machine if device_limit is None else replace(machine, device_bytes=device_limit))
    return CudaLanes(compute_device(name), device_limit)


def read_machine(path: str) -> EmulatedMachine:
    """Read the rates of an emulated machine from a JSON object, as `EmulatedMachine.from_rates` wants them.

    Raises:
        ConfigError: The file cannot be read, lacks a rate, or has one that is not positive.
    """
    try:
        rates = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the emulated machine ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: the emulated machine is no JSON ({error})") from error
    if not isinstance(rates, dict):
        raise ConfigError(f"{path}: the emulated machine must be a JSON object of rates, not {rates!r:.40}")
    for name in (*EmulatedMachine.RATES, "device_bytes"):
        value = rates.get(name, 1)  # what is missing is refused below
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"{path}: {name} of the emulated machine is {value!r}; use a positive number")
    try:
        return EmulatedMachine.from_rates(rates)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def compute_device(name: str) -> torch.device:
    """Return where the tensors of a device of that name are; emulated ones are on the CPU.

    Raises:
        ConfigError: As `check_device`.
    """
    name = check_device(name)
    if name.partition(":")[0] != "cuda":
        return torch.device("cpu")
    return torch.device(f"cuda:{name.partition(':')[2] or torch.cuda.current_device()}")


def check_device(name: str) -> str:
    """Return the device that `name` stands for: `auto` is CUDA where there is one, else the CPU.

    Others are `cpu`, `cuda`, `cuda:1`, `checked`, `emulated`, and `emulated:FILE` with the rates of a file.

    Raises:
        ConfigError: An unknown device, CUDA where there is none, or a file that describes no machine.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name in ("cpu", "checked", "emulated"):
        return name
    if name.startswith(_EMULATED):
        read_machine(name.removeprefix(_EMULATED))
        return name
    if name.partition(":")[0] != "cuda":
        raise ConfigError(
            f"device is {name!r}; use auto, cpu, cuda, cuda:N, emulated, emulated:FILE or checked"
        )
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no CUDA device; use device=cpu, or auto")
    index, count = name.partition(":")[2] or "0", torch.cuda.device_count()
    if not index.isdigit() or int(index) >= count:
        raise ConfigError(f"device is {name!r}, but CUDA devices are cuda:0 to cuda:{count - 1}")
    return name
