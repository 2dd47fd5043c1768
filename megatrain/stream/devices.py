"""Chooses the lanes for a device by its name."""

from __future__ import annotations

import torch

from megatrain.errors import ConfigError
from megatrain.stream.lanes import CheckedLanes, CudaLanes, EmulatedLanes, EmulatedMachine, InlineLanes, Lanes


def make_lanes(device: str | torch.device | Lanes, device_limit: int | None = None) -> Lanes:
    """Choose a backend: `cpu`, `cuda`, `cuda:1`, `checked`, `emulated`, `auto`, or lanes made by the caller.

    Raises:
        ConfigError: An unknown device, or CUDA where there is none.
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
    return CudaLanes(compute_device(name), device_limit)


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

    Raises:
        ConfigError: An unknown device, or CUDA where there is none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name in ("cpu", "checked", "emulated"):
        return name
    if name.partition(":")[0] != "cuda":
        raise ConfigError(f"device is {name!r}; use auto, cpu, cuda, cuda:N, emulated or checked")
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no CUDA device; use device=cpu, or auto")
    index, count = name.partition(":")[2] or "0", torch.cuda.device_count()
    if not index.isdigit() or int(index) >= count:
        raise ConfigError(f"device is {name!r}, but CUDA devices are cuda:0 to cuda:{count - 1}")
    return name
