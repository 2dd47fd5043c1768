"""Health of the machine while it trains: the device's power, heat, throttling and errors; swap; drive wear.

`MachineHealth.sample` reads a few counters, once per step; it waits for nothing and changes nothing. What a
machine does not tell is None, and a missing driver is said once. Devices are asked through NVML
(`nvidia-ml-py`, in the `gpu` extra), found by their PCI address, or by their UUID where torch does not tell
that: NVML counts devices that `CUDA_VISIBLE_DEVICES` hides. None of this has run beside a GPU yet; the
tests pass an object in that answers like NVML.

Source: https://docs.nvidia.com/deploy/nvml-api/ (clock event reasons and memory error types).
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.hardware.system_files import text_of

_log = logging.getLogger(__name__)

REASONS: Mapping[int, str] = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""The reasons why a device is slower than it could be; an idle device and chosen clocks are none."""
_POWER_CAP = REASONS[0x04]
_CORRECTED, _UNCORRECTED = 0, 1
_SINCE_BOOT = 0
_SLOWDOWN = 1
"""NVML_TEMPERATURE_THRESHOLD_SLOWDOWN."""
WORN_SHARE = 0.1
"""Part of a drive's rated writes that one run may use up before it is warned of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vitals:
    """The values of one sample; None: the value is not known."""

    power_w: float | None = None
    """The power that the device draws now."""
    temperature_c: float | None = None
    throttled: tuple[str, ...] | None = None
    """The reasons why the device runs slower than it could; empty: it does not."""
    energy_j: float | None = None
    """The energy that the device has taken since the sample before."""
    ecc_errors: int | None = None
    """New memory errors of the device since the sample before, corrected ones included."""
    swap_bytes: int | None = None
    """Bytes that the machine has swapped in and out since the sample before."""
    drive_written_bytes: int | None = None
    """Bytes that the run has written to drives so far."""


class Link(NamedTuple):
    """The PCI Express link of a device."""

    width: int
    """The lanes that are in use."""
    most: int
    """The lanes that device and slot could use."""
    generation: int
    newest: int
    """The newest generation that device and slot know."""


class Sensor:
    """One device as NVML sees it. A question that it does not answer is not asked again."""

    def __init__(self, nvml: Any, handle: Any, address: str) -> None:
        """Ask through `nvml`, a module like `pynvml` that is initialised."""
        self.address = address
        """The name of the device that `nvidia-smi -i` takes."""
        self._nvml = nvml
        self._handle = handle
        self._silent: set[str] = set()

    def power_w(self) -> float | None:
        """Return the power that the device draws."""
        return _scaled(self._ask("nvmlDeviceGetPowerUsage"), 1e-3)

    def power_limit_w(self) -> float | None:
        """Return the limit that is set."""
        return _scaled(self._ask("nvmlDeviceGetPowerManagementLimit"), 1e-3)

    def power_limits_w(self) -> tuple[float, float] | None:
        """Return the lowest and the highest limit that can be set."""
        limits = self._ask("nvmlDeviceGetPowerManagementLimitConstraints")
        return None if limits is None else (limits[0] * 1e-3, limits[1] * 1e-3)

    def temperature_c(self) -> float | None:
        """Return the temperature of the processor."""
        return _scaled(self._ask("nvmlDeviceGetTemperature", 0), 1.0)

    def slowdown_c(self) -> float | None:
        """Return the temperature at which the processor slows itself down."""
        return _scaled(self._ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN), 1.0)

    def link(self) -> Link | None:
        """Return the width of the link to the host, and its generation; None: one of them is not told.

        An idle device lowers the generation to save power, and never the width.
        """
        asked = ("CurrPcieLinkWidth", "MaxPcieLinkWidth", "CurrPcieLinkGeneration", "MaxPcieLinkGeneration")
        found = [self._ask(f"nvmlDeviceGet{name}") for name in asked]
        return None if None in found else Link(*map(int, found))

    def energy_j(self) -> float | None:
        """Return the energy used since the driver was loaded."""
        return _scaled(self._ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3)

    def throttled(self) -> tuple[str, ...] | None:
        """Return the names of `REASONS` that hold now."""
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:  # the name before driver 535
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if mask is None else tuple(text for bit, text in REASONS.items() if mask & bit)

    def ecc_errors(self, *, corrected: bool) -> int | None:
        """Return the memory errors since the driver was loaded."""
        kind = _CORRECTED if corrected else _UNCORRECTED
        count = self._ask("nvmlDeviceGetTotalEccErrors", kind, _SINCE_BOOT)
        return None if count is None else int(count)

    def has_ecc(self) -> bool | None:
        """Return whether memory errors are corrected now; None: the device cannot."""
        modes = self._ask("nvmlDeviceGetEccMode")
        return None if modes is None else bool(modes[0])

    def driver(self) -> str | None:
        """Return the driver's version."""
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return None
        return version.decode() if isinstance(version, bytes) else str(version)

    def _ask(self, question: str, *arguments: int) -> Any:
        function = getattr(self._nvml, question, None)
        if function is None or question in self._silent:
            return None
        try:
            return function(self._handle, *arguments)
        except self._nvml.NVMLError:
            self._silent.add(question)
            return None


def pci_address(properties: Any) -> str | None:
    """Return where a CUDA device is, such as `0000:3b:00.0`; None where this torch does not tell."""
    if not hasattr(properties, "pci_bus_id"):
        return None
    domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def open_sensor(properties: Any, nvml: Any = None) -> Sensor | None:
    """Return the sensor of a CUDA device; None, said in the log, where NVML or its package is missing.

    Args:
        properties: `torch.cuda.get_device_properties(device)`.
        nvml: a module like `pynvml`; None: that one.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            _log.warning(
                "power, temperature and errors of the device are not known: pip install nvidia-ml-py (the "
                "gpu extra has it)"
            )
            return None
    try:
        nvml.nvmlInit()
        address = pci_address(properties)
        if address is not None:
            return Sensor(nvml, nvml.nvmlDeviceGetHandleByPciBusId(address), address)
        uuid = f"GPU-{properties.uuid}"
        return Sensor(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), uuid)
    except nvml.NVMLError as error:
        _log.warning("power, temperature and errors of the device are not known: NVML says %s", error)
        return None


def sensor_of(device: Any) -> Sensor | None:
    """Return the sensor of a device, if it is one that may have one: those of other vendors are not known."""
    if device.type != "cuda":
        return None
    import torch

    return open_sensor(torch.cuda.get_device_properties(device))


class MachineHealth:
    """Samples of one run, with an alarm for what a user must know. Each alarm sounds once."""

    def __init__(
        self,
        sensor: Sensor | None = None,
        *,
        rated_bytes_written: float | None = None,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the counters' values of now as zero.

        Args:
            sensor: of the device; None: none, or not known.
            rated_bytes_written: endurance of the drives that the run writes to.
            root: of the file system that `/proc` is read from.
            clock: seconds.
        """
        self._sensor = sensor
        self._rated_bytes_written = rated_bytes_written
        self._vmstat, self._io, self._clock = root / "proc/vmstat", root / "proc/self/io", clock
        self._warned: set[str] = set()
        self._written_before = self._written()
        self._written_earlier = self._written_by_others = 0
        self.begin()

    def begin(self) -> None:
        """Begin the first interval here: what came before, such as loading a model, does not count."""
        sensor = self._sensor
        self._swapped = self._pages_swapped()
        self._energy_j = None if sensor is None else sensor.energy_j()
        self._power_w = None if sensor is None else sensor.power_w()
        self._ecc = self._ecc_counts()
        self._sampled_s = self._clock()

    def resume(self, written_bytes: int) -> None:
        """Count on from what earlier processes of the run have written."""
        self._written_earlier = written_bytes

    def count_others(self, written_bytes: int) -> None:
        """Count what the other processes of the run have written since it began, or went on."""
        self._written_by_others = written_bytes

    def own_written_bytes(self) -> int | None:
        """Return what this process has written to drives so far; None: the system does not count."""
        written = self._written()
        return None if written is None or self._written_before is None else written - self._written_before

    def written_bytes(self) -> int | None:
        """Return what the run has written to drives so far; None: the system does not count."""
        own = self.own_written_bytes()
        return None if own is None else self._written_earlier + own + self._written_by_others

    def sample(self) -> Vitals:
        """Return what has happened since the sample before."""
        now_s = self._clock()
        elapsed_s, self._sampled_s = now_s - self._sampled_s, now_s
        swapped = self._pages_swapped()
        swap_bytes = None
        if swapped is not None and self._swapped is not None:
            swap_bytes = (swapped - self._swapped) * os.sysconf("SC_PAGE_SIZE")
        self._swapped = swapped
        vitals = Vitals(
            swap_bytes=swap_bytes,
            drive_written_bytes=self.written_bytes(),
            **self._sample_device(elapsed_s),
        )
        self._raise_alarms(vitals)
        return vitals

    def _sample_device(self, elapsed_s: float) -> dict[str, Any]:
        sensor = self._sensor
        if sensor is None:
            return {}
        power_w, total_j = sensor.power_w(), sensor.energy_j()
        energy_j = None
        if total_j is not None and self._energy_j is not None:
            energy_j = total_j - self._energy_j
        elif power_w is not None and self._power_w is not None:  # no counter: the mean of both ends
            energy_j = (power_w + self._power_w) / 2 * elapsed_s
        ecc, before = self._ecc_counts(), self._ecc
        new = None if ecc is None or before is None else (ecc[0] - before[0], ecc[1] - before[1])
        if new is not None and new[1] > 0:
            _log.warning(
                "the device had %d memory errors that it could not correct: results since the last "
                "checkpoint are in doubt. Stop, resume from it, and have the device looked at (nvidia-smi "
                "-q -d ECC)",
                new[1],
            )
        self._energy_j, self._power_w, self._ecc = total_j, power_w, ecc
        return {
            "power_w": power_w,
            "temperature_c": sensor.temperature_c(),
            "throttled": sensor.throttled(),
            "energy_j": energy_j,
            "ecc_errors": None if new is None else sum(new),
        }

    def _raise_alarms(self, vitals: Vitals) -> None:
        if vitals.swap_bytes:
            self._warn(
                "swap",
                "the machine swaps (%.1f MiB since the step before), which makes steps many times slower: "
                "free memory, lower memory.host_limit, or turn swap off (swapoff -a)",
                vitals.swap_bytes / 2**20,
            )
        hot = [reason for reason in vitals.throttled or () if reason != _POWER_CAP]
        if hot:
            self._warn(
                "throttled",
                "the device is slowed down (%s) at %s C: look at its cooling and its power supply",
                ", ".join(hot),
                "unknown" if vitals.temperature_c is None else f"{vitals.temperature_c:.0f}",
            )
        rating, written = self._rated_bytes_written, vitals.drive_written_bytes
        if rating is not None and written is not None and written > WORN_SHARE * rating:
            self._warn(
                "worn",
                "this run has written %.3g TB, %.0f %% of what its drives are rated for "
                "(hardware.rated_bytes_written)",
                written / 1e12,
                100 * written / rating,
            )

    def _warn(self, key: str, text: str, *values: object) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning(text, *values)

    def _ecc_counts(self) -> tuple[int, int] | None:
        if self._sensor is None:
            return None
        counts = self._sensor.ecc_errors(corrected=True), self._sensor.ecc_errors(corrected=False)
        return None if counts[0] is None or counts[1] is None else (counts[0], counts[1])

    def _pages_swapped(self) -> int | None:
        return _sum_of(self._vmstat, r"^pswp(?:in|out) (\d+)$")

    def _written(self) -> int | None:
        return _sum_of(self._io, r"^write_bytes: (\d+)$")


def power_cap_advice(sensor: Sensor | None, cap_w: float) -> str | None:
    """Return what to do so that the device takes no more than `cap_w` watts; None if that is set.

    Nothing is changed: that takes the rights of an administrator, and bears on everyone who uses the device.
    """
    limit_w = None if sensor is None else sensor.power_limit_w()
    if sensor is None or limit_w is None:
        return f"hardware.power_cap is {cap_w:g} W, but the device's limit is not known; nothing is changed"
    if abs(limit_w - cap_w) < 0.5:
        return None
    limits = sensor.power_limits_w()
    if limits is not None and not limits[0] <= cap_w <= limits[1]:
        return (
            f"hardware.power_cap is {cap_w:g} W, but the device takes limits from {limits[0]:g} to "
            f"{limits[1]:g} W; its limit is {limit_w:g} W"
        )
    return (
        f"hardware.power_cap is {cap_w:g} W, but the device's limit is {limit_w:g} W; to set it, run: "
        f"sudo nvidia-smi -i {sensor.address} -pl {cap_w:.0f}"
    )


def _scaled(value: Any, factor: float) -> float | None:
    return None if value is None else float(value) * factor


def _sum_of(path: Path, pattern: str) -> int | None:
    """Add up the numbers that a pattern finds in a file; None: no file, or none found."""
    found = re.findall(pattern, text_of(path), re.MULTILINE)
    return sum(map(int, found)) if found else None
