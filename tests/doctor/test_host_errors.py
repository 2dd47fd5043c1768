"""Errors of host memory and of drives, on trees of files and outputs of other machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatrain.doctor.checks import Level
from megatrain.doctor.disk import BlockDevice
from megatrain.doctor.examine import examine
from megatrain.doctor.host_errors import check_memory_errors
from megatrain.doctor.smart import Smart, check_smart, read_smart
from tests.doctor.test_checks import NVME, write

DAY_S = 86_400


def edac_tree(root: Path, *counts: tuple[int, int]) -> Path:
    """Write controllers with (corrected, uncorrected) counts, all in the second of their two modules."""
    for number, (corrected, uncorrected) in enumerate(counts):
        place = root / f"sys/devices/system/edac/mc/mc{number}"
        write(place / "ce_count", f"{corrected}\n")
        write(place / "ue_count", f"{uncorrected}\n")
        write(place / "seconds_since_reset", f"{2 * DAY_S}\n")
        for slot in (0, 1):
            write(place / f"dimm{slot}/dimm_label", f"CPU0_MC{number}_DIMM{slot}\n")
            write(place / f"dimm{slot}/dimm_ce_count", f"{slot * corrected}\n")
            write(place / f"dimm{slot}/dimm_ue_count", f"{slot * uncorrected}\n")
    return root


def test_errors_of_host_memory(tmp_path: Path) -> None:
    sound = check_memory_errors(edac_tree(tmp_path / "sound", (0, 0), (0, 0)))
    assert (sound.level, sound.text) == (Level.OK, "ECC on 2 controllers: 0 corrected, 0 not in 2.0 days")
    some = check_memory_errors(edac_tree(tmp_path / "some", (0, 0), (7, 0), (1200, 0)))
    assert some.level is Level.WARN
    assert some.text == "ECC on 3 controllers: 1,207 corrected, 0 not in 2.0 days, most in CPU0_MC2_DIMM1"
    bad = check_memory_errors(edac_tree(tmp_path / "bad", (900, 0), (3, 1)))
    assert bad.level is Level.FAIL
    assert bad.text == "ECC on 2 controllers: 903 corrected, 1 not in 2.0 days, most in CPU0_MC1_DIMM1"


@pytest.mark.parametrize("content", [None, "", "many"])
def test_where_nothing_is_counted_it_is_said(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "sys/devices/system/edac/mc/mc0").mkdir(parents=True)
    if content is not None:
        write(tmp_path / "sys/devices/system/edac/mc/mc0/ce_count", content)
    found = check_memory_errors(tmp_path)
    assert found.level is Level.OK
    assert "the kernel counts none" in found.text


def smartctl(**log: Any) -> str:
    numbers = {"critical_warning": 0, "available_spare": 100, "percentage_used": 3, "media_errors": 0}
    return json.dumps({"smartctl": {}, "nvme_smart_health_information_log": numbers | log})


def nvme_cli(**log: Any) -> str:
    numbers = {"critical_warning": 0, "avail_spare": 100, "percent_used": 3, "media_errors": 0}
    return json.dumps(numbers | log)


def ata(lost: int, *, passes: bool = True, used: int | None = None) -> str:
    table = [
        {"id": 5, "raw": {"value": lost}},
        {"id": 9, "raw": {"value": 9000}},
        {"id": 197, "raw": {"value": 1}},
    ]
    body: dict[str, Any] = {"ata_smart_attributes": {"table": table}, "smart_status": {"passed": passes}}
    return json.dumps(body | ({} if used is None else {"endurance_used": {"current_percent": used}}))


def answers(texts: dict[str, str]) -> Callable[[Sequence[str]], str | None]:
    """Return what runs commands of the given outputs, by program."""
    return lambda command: texts.get(command[0])


@pytest.mark.parametrize(
    ("texts", "used", "errors", "spare", "level"),
    [
        ({"smartctl": smartctl()}, 0.03, 0, 1.0, Level.OK),
        ({"nvme": nvme_cli()}, 0.03, 0, 1.0, Level.OK),
        ({"smartctl": "Permission denied", "nvme": nvme_cli(percent_used=112)}, 1.12, 0, 1.0, Level.OK),
        ({"smartctl": smartctl(media_errors=4)}, 0.03, 4, 1.0, Level.WARN),
        ({"smartctl": smartctl(available_spare=10)}, 0.03, 0, 0.1, Level.WARN),
        ({"smartctl": smartctl(critical_warning=4)}, 0.03, 0, 1.0, Level.FAIL),
        ({"nvme": nvme_cli(critical_warning={"value": 1, "available_spare": 1})}, 0.03, 0, 1.0, Level.FAIL),
    ],
)
def test_health_of_nvme_drives(
    texts: dict[str, str], used: float, errors: int, spare: float, level: Level
) -> None:
    found = read_smart("nvme0n1", answers(texts))
    assert found == Smart(used=used, media_errors=errors, spare=spare, is_critical=level is Level.FAIL)
    check = check_smart(found)
    assert check.level is level
    assert bool(check.fix) == (level is not Level.OK)
    assert f"{errors} that it could not correct, {spare:.0%} of its spare blocks left" in check.text


def test_health_of_disks() -> None:
    found = read_smart("sda", answers({"smartctl": ata(0, used=40)}))
    assert found == Smart(used=0.4, media_errors=1, spare=None, is_critical=False)
    failing = read_smart("sda", answers({"smartctl": ata(70, passes=False)}))
    assert failing == Smart(used=None, media_errors=71, spare=None, is_critical=True)
    assert check_smart(failing).level is Level.FAIL


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no device",
        "[]",
        "{}",
        "[" * 9999,
        '{"nvme_smart_health_information_log": 3}',
        '{"ata_smart_attributes": []}',
    ],
)
def test_what_says_nothing_is_not_told(text: str) -> None:
    assert read_smart("nvme0n1", answers({"smartctl": text, "nvme": text})) is None
    assert "not told" in check_smart(None).text


def test_odd_values_are_left_out() -> None:
    odd = smartctl(percentage_used="3", media_errors=-1, available_spare=True, critical_warning=None)
    assert read_smart("nvme0n1", answers({"smartctl": odd})) == Smart(
        used=None, media_errors=None, spare=None, is_critical=False
    )


def test_the_doctor_tells_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def told(name: str) -> Smart:
        asked.append(name)
        return Smart(used=0.93, media_errors=2, spare=0.5, is_critical=False)

    def drive(path: Path) -> BlockDevice:
        return NVME

    module = sys.modules["megatrain.doctor.examine"]  # the package has a function of that name
    monkeypatch.setattr(module, "read_smart", told)
    monkeypatch.setattr(module, "block_device", drive)
    checks = {check.name: check for check in examine(tmp_path).checks}
    assert asked == ["nvme1n1"]
    assert checks["drive errors"].level is checks["drive wear"].level is Level.WARN
    assert "93% of its rated life used" in checks["drive wear"].text
    assert "host memory errors" in checks
