"""Checks of installed packages and of the device that torch finds."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from megatrain.config.optimizers.registry import DEFAULT
from megatrain.doctor.checks import ROOT, Check, failed, passed, warning
from megatrain.hardware.health import Sensor
from megatrain.hardware.memory import GIB
from megatrain.layout.block_bytes import BlockBytes
from megatrain.optim.updates import kernels_of
from megatrain.versions import versions_of

_SHOWN = ("megatrain", "torch", "transformers", "numba")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on; `none` if not installed."""
    return {"python": platform.python_version(), **versions_of(_SHOWN)}


def check_versions(found: dict[str, str] | None = None, wanted: list[str] | None = None) -> Check:
    """Compare the installed versions with what megatrain asks for.

    Args:
        found: by name; None: those installed.
        wanted: requirements such as `torch>=2.11`; None: megatrain's own.
    """
    found = versions() if found is None else found
    if wanted is None:
        try:
            wanted = metadata.requires("megatrain") or []
        except metadata.PackageNotFoundError:  # run from its source folder
            wanted = []
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    wrong = []
    for requirement in wanted:
        match = re.match(r"([\w-]+)>=([\d.]+)$", requirement.replace(" ", ""))
        if match and match[1] in found and _numbers(found[match[1]]) < _numbers(match[2]):
            wrong.append(requirement)
    if wrong:
        return failed(
            "versions",
            f"{text}; wanted: {', '.join(wrong)}",
            f"pip install {' '.join(repr(requirement) for requirement in wrong)}",
        )
    return passed("versions", text)


_CLOSE_C = 5.0
"""So close to the temperature at which it slows down, a device is hot."""


def check_device(device: torch.device, root: Path = ROOT) -> Check:
    """Say what blocks will run on."""
    if device.type == "cuda":
        return _check_gpu(device)
    if (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists():
        return failed(
            "device",
            "cpu, though an NVIDIA driver is here: torch sees no CUDA device",
            "install a torch build with CUDA (pip show torch says which this is), and look at "
            "CUDA_VISIBLE_DEVICES, and at --gpus all of docker run",
        )
    return warning(
        "device",
        "cpu: torch sees no accelerator, so blocks run where their weights are",
        "train small models here, or plan for another machine: megatrain plan --machine h200",
    )


def _check_gpu(device: torch.device) -> Check:
    properties = torch.cuda.get_device_properties(device)
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        return failed(
            "device",
            f"{properties.name} does not answer ({str(error).splitlines()[0]})",
            "ask nvidia-smi whether the driver knows it; end the processes on it, or restart",
        )
    text = (
        f"{properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, compute capability "
        f"{properties.major}.{properties.minor}"
    )
    if free < 0.8 * total:
        return warning(
            "device",
            f"{text}; another process holds the rest",
            "nvidia-smi names the processes; stop them, or set CUDA_VISIBLE_DEVICES to a free device",
        )
    return passed("device", text)


def check_updates(device: torch.device) -> Check:
    """Say what updates the blocks whose state is on the device, and how much of its memory that moves."""
    name, reason = "updates on the device", kernels_of(DEFAULT).why_not_fused(device.type)
    fused_bytes = BlockBytes(num_split=1, num_state=1).fused_update_bytes(DEFAULT)
    if reason is None:
        text = f"one Triton kernel, {fused_bytes} bytes per parameter; its bits were compared with torch's"
        return passed(name, text)
    return warning(
        name,
        f"torch's operations, {DEFAULT.device_bytes} bytes per parameter where Triton's kernel moves "
        f"{fused_bytes}: {reason}",
        "pip install triton where it is not installed; else nothing is to be done",
    )


def check_sensor(sensor: Sensor | None) -> list[Check]:
    """Say what NVML tells of the device: driver, power, heat, memory errors."""
    name = "device health"
    if sensor is None:
        return [
            warning(
                name,
                "not known: NVML or its package is missing",
                "pip install nvidia-ml-py (in the gpu extra)",
            )
        ]
    parts = [f"driver {sensor.driver() or 'unknown'}"]
    power_w, limit_w, heat_c = sensor.power_w(), sensor.power_limit_w(), sensor.temperature_c()
    if power_w is not None and limit_w is not None:
        parts.append(f"{power_w:.0f} of {limit_w:.0f} W")
    if heat_c is not None:
        parts.append(f"{heat_c:.0f} C")
    slowed = [reason for reason in sensor.throttled() or () if reason != "power cap"]
    most_c = sensor.slowdown_c()
    is_hot = heat_c is not None and most_c is not None and heat_c > most_c - _CLOSE_C
    parts += [f"it slows down at {most_c:.0f} C"] if is_hot else []
    text = ", ".join([*parts, *(f"slowed down: {reason}" for reason in slowed)])
    fix = "look at its cooling and its power supply"
    found = warning(name, text, fix) if slowed or is_hot else passed(name, text)
    return [found, _check_ecc(sensor), *_check_link(sensor)]


def _check_link(sensor: Sensor) -> list[Check]:
    link = sensor.link()
    if link is None:
        return []
    text = f"PCI Express {link.generation}, {link.width} of {link.most} lanes"
    if link.width == link.most:
        return [passed("link to the host", text)]
    return [
        warning(
            "link to the host",
            f"{text}: copies have {link.width / link.most:.0%} of the speed that they could have",
            "put the card into a slot with all lanes, seat it again, and look at the riser and the BIOS",
        )
    ]


def _check_ecc(sensor: Sensor) -> Check:
    name, has_ecc = "device memory errors", sensor.has_ecc()
    if has_ecc is None:
        return passed(name, "this device does not correct any (no ECC)")
    if not has_ecc:
        return warning(
            name,
            "ECC is off: a flipped bit goes into the weights unseen",
            "sudo nvidia-smi -e 1, then restart the machine",
        )
    bad = sensor.ecc_errors(corrected=False)
    if bad:
        return failed(
            name,
            f"{bad} that ECC could not correct since the driver was loaded",
            "do not train on this device: nvidia-smi -q -d ECC,ROW_REMAPPER, then have it replaced",
        )
    return passed(name, f"ECC is on, {sensor.ecc_errors(corrected=True) or 0} corrected")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])
