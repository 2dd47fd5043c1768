"""Health while training: what a sample says, what is warned of and how often, and what is never done."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.hardware.health import MachineHealth, Sensor, Vitals, open_sensor, power_cap_advice
from tests.hardware.nvml import PROPERTIES, FakeNvml

PAGE = os.sysconf("SC_PAGE_SIZE")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_tree(root: Path, *, swapped: int = 50, written: int = 1000) -> Path:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/vmstat").write_text(f"pgfault 9\npswpin {swapped}\npswpout {swapped}\nnr_free 3\n")
    (root / "proc/self/io").write_text(f"read_bytes: 77\nwrite_bytes: {written}\ncancelled_write_bytes: 5\n")
    return root


def sensor_of(nvml: FakeNvml) -> Sensor:
    sensor = open_sensor(PROPERTIES, nvml)
    assert sensor is not None
    return sensor


def make_health(root: Path, nvml: FakeNvml | None = None, **options: Any) -> tuple[MachineHealth, Clock]:
    clock = Clock()
    sensor = None if nvml is None else sensor_of(nvml)
    return MachineHealth(sensor, root=make_tree(root), clock=clock, **options), clock


def test_sample_is_what_has_happened_since_the_one_before(tmp_path: Path) -> None:
    nvml = FakeNvml()
    health, _ = make_health(tmp_path, nvml)
    nvml.answers |= {"TotalEnergyConsumption": 5_600_000, "corrected": 9, "CurrentClocksEventReasons": 0x4}
    make_tree(tmp_path, written=4000)
    assert health.sample() == Vitals(
        power_w=300.0,
        temperature_c=61.0,
        throttled=("power cap",),
        energy_j=600.0,
        ecc_errors=2,
        swap_bytes=0,
        drive_written_bytes=3000,
    )
    make_tree(tmp_path, written=5000)
    again = health.sample()
    assert (again.energy_j, again.ecc_errors, again.drive_written_bytes) == (0.0, 0, 4000)


def test_begin_forgets_what_loading_took(tmp_path: Path) -> None:
    nvml = FakeNvml()
    health, _ = make_health(tmp_path, nvml)
    nvml.answers |= {"TotalEnergyConsumption": 9_000_000}
    make_tree(tmp_path, swapped=70)
    health.begin()
    assert (health.sample().energy_j, health.sample().swap_bytes) == (0.0, 0)


def test_without_an_energy_counter_power_is_summed_over_time(tmp_path: Path) -> None:
    nvml = FakeNvml(TotalEnergyConsumption=None, PowerUsage=200_000)
    health, clock = make_health(tmp_path, nvml)
    nvml.answers["PowerUsage"] = 400_000
    clock.now_s += 10
    assert health.sample().energy_j == 3000.0
    assert nvml.asked.count("TotalEnergyConsumption") == 1, "what is not supported is not asked again"


def test_device_that_tells_nothing_has_no_figures(tmp_path: Path) -> None:
    nvml = FakeNvml()
    nvml.answers = dict.fromkeys(nvml.answers)
    health, _ = make_health(tmp_path, nvml)
    assert health.sample() == Vitals(swap_bytes=0, drive_written_bytes=0)


def test_missing_driver_is_said_once_and_gives_no_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = FakeNvml()
    nvml.has_driver = False
    sensor = open_sensor(PROPERTIES, nvml)
    assert sensor is None
    health = MachineHealth(sensor, root=make_tree(tmp_path))
    for _ in range(3):
        assert health.sample() == Vitals(swap_bytes=0, drive_written_bytes=0)
    assert caplog.messages == [
        "power, temperature and errors of the device are not known: NVML says Driver Not Loaded"
    ]


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_sensor(PROPERTIES) is None
    assert "pip install nvidia-ml-py" in caplog.text


def test_installed_package_is_asked_for_the_device_at_its_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = types.ModuleType("pynvml")
    fake = FakeNvml()
    monkeypatch.setattr(module, "__getattr__", lambda name: getattr(fake, name), raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert open_sensor(PROPERTIES) is not None
    elsewhere = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x5C, pci_device_id=0)
    assert open_sensor(elsewhere) is None
    by_uuid = open_sensor(SimpleNamespace(uuid="12ab"))
    assert by_uuid is not None
    assert by_uuid.power_w() == 300.0
    assert "NVML says Not Found" in caplog.text


@pytest.mark.parametrize("question", ["CurrentClocksEventReasons", "CurrentClocksThrottleReasons"])
def test_device_that_is_too_hot_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, question: str
) -> None:
    """Under the name of drivers since 535, and under the one before."""
    nvml = FakeNvml(Temperature=91)
    del nvml.answers["CurrentClocksEventReasons"]
    nvml.answers[question] = 0x1 | 0x4 | 0x40
    health, _ = make_health(tmp_path, nvml)
    for _ in range(2):
        assert health.sample().throttled == ("power cap", "hardware thermal slowdown")
    assert caplog.messages == [
        "the device is slowed down (hardware thermal slowdown) at 91 C: look at its cooling and its power "
        "supply"
    ]


def test_power_cap_alone_is_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    health, _ = make_health(tmp_path, FakeNvml(CurrentClocksEventReasons=0x4))
    assert health.sample().throttled == ("power cap",)
    assert caplog.messages == []


def test_every_memory_error_that_was_not_corrected_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = FakeNvml(uncorrected=3)
    health, _ = make_health(tmp_path, nvml)
    assert health.sample().ecc_errors == 0, "errors of earlier runs are not this run's"
    assert caplog.messages == []
    nvml.answers |= {"uncorrected": 5, "corrected": 8}
    assert health.sample().ecc_errors == 3
    assert len(caplog.messages) == 1
    assert "2 memory errors that it could not correct" in caplog.text
    assert health.sample().ecc_errors == 0
    nvml.answers["uncorrected"] = 6
    health.sample()
    assert len(caplog.messages) == 2


def test_swapping_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    health, _ = make_health(tmp_path)
    assert health.sample().swap_bytes == 0
    assert caplog.messages == []
    make_tree(tmp_path, swapped=60)
    assert health.sample().swap_bytes == 20 * PAGE
    make_tree(tmp_path, swapped=61)
    assert health.sample().swap_bytes == 2 * PAGE
    assert len(caplog.messages) == 1
    assert "the machine swaps" in caplog.text
    assert "swapoff -a" in caplog.text


def test_wear_is_warned_of_at_a_tenth_of_the_rating(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    health, _ = make_health(tmp_path, rated_bytes_written=1e12)
    make_tree(tmp_path, written=1000 + 10**11)
    health.sample()
    assert caplog.messages == []
    make_tree(tmp_path, written=1001 + 10**11)
    for _ in range(2):
        health.sample()
    assert len(caplog.messages) == 1
    assert "has written 0.1 TB, 10 % of what its drives are rated for" in caplog.text


def test_writes_before_a_resume_count(tmp_path: Path) -> None:
    health, _ = make_health(tmp_path)
    health.resume(500)
    make_tree(tmp_path, written=1200)
    assert (health.sample().drive_written_bytes, health.written_bytes()) == (700, 700)


def test_system_without_counters_has_no_figures(tmp_path: Path) -> None:
    assert MachineHealth(root=tmp_path).sample() == Vitals()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bytes_written_by_this_process_are_counted(tmp_path: Path) -> None:
    health = MachineHealth()
    with open(tmp_path / "data", "wb") as file:
        file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    written = health.sample().drive_written_bytes
    if written is None:
        pytest.skip("this system does not count")
    assert written == 0 or written >= 1 << 20, "nothing where the directory is in memory"


def test_power_cap_is_advice_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml()
    sensor = sensor_of(nvml)
    assert power_cap_advice(sensor, 350) is None
    assert power_cap_advice(sensor, 300) == (
        "hardware.power_cap is 300 W, but the device's limit is 350 W; to set it, run: sudo nvidia-smi -i "
        "0000:3b:00.0 -pl 300"
    )
    assert "takes limits from 100 to 400 W" in str(power_cap_advice(sensor, 500))
    assert "is not known; nothing is changed" in str(power_cap_advice(None, 300))
    assert "is not known" in str(power_cap_advice(sensor_of(FakeNvml(PowerManagementLimit=None)), 300))
    assert set(nvml.asked) == {"PowerManagementLimit", "PowerManagementLimitConstraints"}
