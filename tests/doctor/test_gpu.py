"""What the doctor says of a GPU, with torch and NVML answering for one that is not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatrain.doctor.checks import Level
from megatrain.doctor.machine_spec import device_name, open_own_sensor, present_device
from megatrain.doctor.software import check_device, check_sensor, check_updates
from megatrain.errors import ConfigError
from megatrain.hardware.health import open_sensor
from megatrain.optim import adamw
from tests.hardware.nvml import PROPERTIES, FakeNvml

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """An H100 with some memory free, which a test may change."""
    memory = {"free": 78 * GIB, "total": 80 * GIB}
    properties = SimpleNamespace(**vars(PROPERTIES), name="NVIDIA H100", major=9, minor=0)
    for name, answer in (
        ("is_available", lambda: True),
        ("current_device", lambda: 0),
        ("get_device_properties", lambda _: properties),
        ("get_device_name", lambda _: "NVIDIA H100"),
        ("mem_get_info", lambda _: (memory["free"], memory["total"])),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr("importlib.import_module", lambda _: FakeNvml())
    return memory


def test_gpu_is_described_with_its_power_limit(gpu: dict[str, int], tmp_path: Path) -> None:
    check = check_device(torch.device("cuda", 0), tmp_path)
    assert (check.level, check.text) == (
        Level.OK,
        "NVIDIA H100, 78.0 of 80.0 GiB free, compute capability 9.0",
    )
    device = present_device(open_own_sensor())
    assert (device.name, device.nbytes, device.watts) == ("NVIDIA H100", 78 * GIB, 350.0)
    assert device_name() == "NVIDIA H100"
    assert present_device().watts is None


def test_what_updates_blocks_on_the_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "why_not_fused", lambda kind: None)
    check = check_updates(torch.device("cuda", 0))
    assert (check.level, check.fix) == (Level.OK, "")
    assert "one Triton kernel, 28 bytes per parameter" in check.text
    monkeypatch.setattr(adamw, "why_not_fused", lambda kind: "Triton is not installed")
    check = check_updates(torch.device("cuda", 0))
    assert check.level is Level.WARN
    assert check.text == (
        "torch's operations, 650 bytes per parameter where Triton's kernel moves 28: Triton is not installed"
    )
    assert "pip install triton" in check.fix


def test_gpu_that_others_use_is_warned_of(gpu: dict[str, int], tmp_path: Path) -> None:
    gpu["free"] = 30 * GIB
    check = check_device(torch.device("cuda", 0), tmp_path)
    assert check.level is Level.WARN
    assert "another process holds the rest" in check.text


def test_gpu_that_does_not_answer_is_one_sentence(
    gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("CUDA error: unknown error\nfor debugging, pass CUDA_LAUNCH_BLOCKING=1")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    with pytest.raises(ConfigError, match="the device cuda:0 does not answer"):
        present_device()
    check = check_device(torch.device("cuda", 0), tmp_path)
    assert check.level is Level.FAIL
    assert check.text == "NVIDIA H100 does not answer (CUDA error: unknown error)"


@pytest.mark.parametrize(
    ("answers", "level", "text"),
    [
        ({}, Level.OK, "PCI Express 5, 16 of 16 lanes"),
        (
            {"CurrPcieLinkWidth": 8},
            Level.WARN,
            "PCI Express 5, 8 of 16 lanes: copies have 50% of the speed that they could have",
        ),
    ],
)
def test_a_card_with_too_few_lanes_is_named(answers: dict[str, int], level: Level, text: str) -> None:
    link = {f"{name}PcieLink{kind}": n for name in ("Curr", "Max") for kind, n in LINK.items()}
    sensor = open_sensor(PROPERTIES, FakeNvml(**{**link, **answers}))
    check = check_sensor(sensor)[-1]
    assert (check.name, check.level, check.text) == ("link to the host", level, text)


LINK = {"Width": 16, "Generation": 5}


def test_a_link_that_is_not_told_is_not_judged() -> None:
    assert [check.name for check in check_sensor(open_sensor(PROPERTIES, FakeNvml()))] == [
        "device health",
        "device memory errors",
    ]


@pytest.mark.parametrize(("heat_c", "level"), [(84, Level.OK), (87, Level.WARN)])
def test_a_hot_card_is_named_before_it_slows_down(heat_c: int, level: Level) -> None:
    answers = {"Temperature": heat_c, "TemperatureThreshold": 90}
    check = check_sensor(open_sensor(PROPERTIES, FakeNvml(**answers)))[0]
    assert check.level is level
    assert ("it slows down at 90 C" in check.text) is (level is Level.WARN)
