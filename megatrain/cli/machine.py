"""The machine that a command plans for: a named one, or this one, changed by options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.cli.folders import counts_folder, measured_file, prepared_folder
from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from megatrain.hardware import HardwareSpec
    from megatrain.train.caller import Caller, Progress
    from megatrain.train.planning.asking import OwnMachine


_LEAST_RAM = 1 << 20
"""Bytes below which a size of host memory lacks its unit."""


def measure() -> Callable[[], HardwareSpec] | None:
    """Return the function that measures this machine; a CPU has only what `doctor --bench` has kept."""
    from megatrain.hardware.accelerators import accelerator

    if accelerator() is None and not measured_file().exists():
        return None
    from megatrain.doctor import this_machine

    return partial(this_machine, measured_file(), None)


def caller(progress: Progress, *, measures: bool = True) -> Caller:
    """Return a caller with the folders of this user.

    Args:
        progress: The function that is told of slow operations.
        measures: Whether the caller measures this machine, for which torch is loaded.
    """
    from megatrain.train.caller import Caller

    own = measure() if measures else None
    return Caller(counts=counts_folder(), prepared=prepared_folder(), measure=own, progress=progress)


def planned_machine(
    name: str | None,
    ram: str | None = None,
    nvme: str | None = None,
    *,
    gpus: int | None = None,
    nodes: int | None = None,
) -> HardwareSpec | OwnMachine:
    """Return a named machine, or this one as a run on it finds it, changed by options.

    Args:
        name: The name of a bundled machine or a machine file; None means this one.
        ram: The host memory of the machine, such as `64GiB`.
        nvme: The free space on its drives; `0` means none.
        gpus: The number of GPUs of each node; None means all.
        nodes: The number of machines like it.

    Raises:
        ConfigError: There is no such machine, or an option is no size.
    """
    from megatrain.config.sizes import parse_bytes
    from megatrain.hardware import load_machine
    from megatrain.train.planning.gpus import with_gpus

    host_bytes = None if ram is None else parse_bytes(ram, "--ram")
    drive_bytes = None if nvme is None else parse_bytes(nvme, "--nvme")
    if host_bytes is not None and host_bytes < _LEAST_RAM:
        raise ConfigError(
            f"--ram is {host_bytes} bytes; give the machine's host memory with its unit, such as 64GiB"
        )

    def changed(spec: HardwareSpec) -> HardwareSpec:
        if host_bytes is not None:
            spec = spec.with_ram(host_bytes)
        if drive_bytes is not None:
            spec = spec.with_drive_bytes(drive_bytes)
        return with_gpus(spec, gpus, nodes)

    if name is not None:
        return changed(load_machine(name))
    from megatrain.train.planning.asking import OwnMachine

    def with_own_drive(spec: HardwareSpec) -> HardwareSpec:
        from megatrain.doctor import this_machine

        return changed(replace(spec, drives=this_machine(measured_file(), Path()).drives))

    return OwnMachine(measure=measure(), changed=with_own_drive if drive_bytes else changed)
