"""This machine as a `HardwareSpec`: from what `doctor --bench` has kept, or measured in seconds."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from megatrain.config.optimizers.registry import DEFAULT
from megatrain.doctor.bench import QUICK, Bench, run_bench
from megatrain.doctor.disk import block_device
from megatrain.errors import ConfigError
from megatrain.hardware.health import Sensor, sensor_of
from megatrain.hardware.spec import HardwareSpec
from megatrain.hardware.this_machine import (
    Device,
    describe_machine,
    fingerprint,
    load_measured,
    save_measured,
    with_present_capacities,
)
from megatrain.optim.threads import worker_threads
from megatrain.optim.updates import fuses_updates

_log = logging.getLogger(__name__)


def this_machine(kept: Path | None, path: Path | None = None) -> HardwareSpec:
    """Return this machine: rates that `doctor --bench` kept, or quick ones; capacities of now.

    Args:
        kept: file of `keep`; None: measure.
        path: directory whose drive may hold state, which is measured by a file of 64 MiB if nothing is known
            of it; None: no drive.

    Raises:
        ConfigError: `kept` is damaged, or `path` cannot be written.
    """
    drive = "" if path is None else block_device(path).name
    if kept is not None:
        marks = fingerprint(device_name(), worker_threads())
        known = load_measured(kept, machine=marks, drive=drive)
        if known is not None and (known.drives is not None or path is None):
            _log.debug("rates of this machine: kept by doctor --bench")
            return with_present_capacities(known, device=present_device(open_own_sensor()), path=path)
    _log.debug("rates of this machine: measured in a few seconds; megatrain doctor --bench keeps better ones")
    bench = run_bench(compute_device(), path, QUICK, how="measured on this machine, quickly")
    return machine_of(bench, path, open_own_sensor())


def machine_of(bench: Bench, path: Path | None, sensor: Sensor | None = None) -> HardwareSpec:
    """Return this machine with the rates of a bench; `sensor` knows the device's power limit."""
    return describe_machine(bench.rates, device=present_device(sensor), num_cores=worker_threads(), path=path)


def keep(file: Path, spec: HardwareSpec, path: Path) -> None:
    """Keep measured rates for `this_machine`.

    Raises:
        OutputError: The file cannot be written.
    """
    marks = fingerprint(device_name(), worker_threads())
    save_measured(file, spec, machine=marks, drive=block_device(path).name)


def compute_device() -> torch.device:
    """Return where blocks run: the current CUDA device if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_name() -> str:
    """Return the name of the device, `cpu` where the host computes."""
    device = compute_device()
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def open_own_sensor() -> Sensor | None:
    """Return the sensor of the device, if it is one that has one."""
    return sensor_of(compute_device())


def present_device(sensor: Sensor | None = None) -> Device:
    """Return the device with what is free of its memory; on a CPU, without a limit of its own."""
    device = compute_device()
    if device.type == "cpu":
        return Device(name="cpu")
    try:
        free, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise ConfigError(f"the device {device} does not answer ({error}); see megatrain doctor") from error
    return Device(
        name=device_name(),
        nbytes=free,
        watts=None if sensor is None else sensor.power_limit_w(),
        fuses_updates=fuses_updates(DEFAULT, device),
    )
