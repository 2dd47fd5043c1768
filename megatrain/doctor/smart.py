"""What a drive tells of its own health (SMART), by `smartctl` or `nvme` where one is there and may ask.

The kernel has these numbers nowhere below `/sys`, and the device takes the rights of an administrator.
Sources: smartctl(8) and nvme-smart-log(1), both with JSON.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.doctor.checks import Check, failed, passed, warning

_TIMEOUT_S = 10.0
_LITTLE_SPARE = 0.1
_PENDING, _UNCORRECTABLE, _REALLOCATED = 197, 198, 5
"""Numbers of the attributes of ATA drives that count sectors which could not be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Smart:
    """The health of a drive; None of a number: the drive does not tell it."""

    used: float | None
    """The part of its rated life that is used; above 1 beyond it."""
    media_errors: int | None
    """Reads and writes that the drive could not correct, or sectors of a disk that it has given up."""
    spare: float | None
    """The part of its spare blocks that is left."""
    is_critical: bool
    """The drive itself warns that it fails, is read-only, too hot, or out of spare blocks."""


def read_smart(name: str, run: Callable[[Sequence[str]], str | None] | None = None) -> Smart | None:
    """Ask a drive.

    Args:
        name: The kernel's name of it, such as `nvme0n1`.
        run: Runs a command and returns its output; None of it: there is no such program, or it failed. None:
            the programs that are installed.

    Returns:
        What it tells; None: nothing, since no program is there that may ask it.
    """
    run = _run if run is None else run
    device = f"/dev/{name}"
    commands = [["smartctl", "--json", "--all", device]]
    if name.startswith("nvme"):
        commands.append(["nvme", "smart-log", "--output-format=json", device])
    for command in commands:
        found = _parsed(run(command))
        if found is not None:
            return found
    return None


def check_smart(smart: Smart | None) -> Check:
    """Judge what a drive tells of its errors."""
    name = "drive errors"
    if smart is None:
        return passed(
            name, "not told: smartctl or nvme-cli is not installed, or may not read the drive (try with sudo)"
        )
    parts = []
    if smart.media_errors is not None:
        parts.append(f"{smart.media_errors:,} that it could not correct")
    if smart.spare is not None:
        parts.append(f"{smart.spare:.0%} of its spare blocks left")
    text = ", ".join(parts) or "none told"
    if smart.is_critical:
        fix = "copy what is on it elsewhere and replace it: smartctl --all, or nvme smart-log, says why"
        return failed(name, f"the drive says that it fails; {text}", fix)
    is_short = smart.spare is not None and smart.spare <= _LITTLE_SPARE
    if smart.media_errors or is_short:
        return warning(
            name, text, "keep no state of a run on this drive, and copies of its checkpoints elsewhere"
        )
    return passed(name, text)


def _run(command: Sequence[str]) -> str | None:
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return done.stdout  # smartctl's exit code has a bit for each kind of trouble with the drive


def _parsed(text: str | None) -> Smart | None:
    try:
        body = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    log = body.get("nvme_smart_health_information_log")
    if isinstance(log, dict):
        return _nvme(log, "percentage_used", "available_spare")
    if "percent_used" in body or "percentage_used" in body:
        used = "percent_used" if "percent_used" in body else "percentage_used"
        return _nvme(body, used, "avail_spare")
    table = body.get("ata_smart_attributes")
    if isinstance(table, dict) and isinstance(table.get("table"), list):
        return _ata(body, table["table"])
    return None


def _nvme(log: dict[str, Any], used: str, spare: str) -> Smart:
    warned = log.get("critical_warning")
    if isinstance(warned, dict):  # as newer nvme-cli has it, bit by bit
        warned = warned.get("value")
    return Smart(
        used=_share(log.get(used)),
        media_errors=_count(log.get("media_errors")),
        spare=_share(log.get(spare)),
        is_critical=bool(_count(warned)),
    )


def _ata(body: dict[str, Any], table: list[Any]) -> Smart:
    raw = {
        each["id"]: _count(each["raw"].get("value"))
        for each in table
        if isinstance(each, dict) and isinstance(each.get("id"), int) and isinstance(each.get("raw"), dict)
    }
    lost = [raw[number] for number in (_REALLOCATED, _PENDING, _UNCORRECTABLE) if raw.get(number) is not None]
    status, endurance = body.get("smart_status"), body.get("endurance_used")
    return Smart(
        used=_share(endurance.get("current_percent")) if isinstance(endurance, dict) else None,
        media_errors=sum(count or 0 for count in lost) if lost else None,
        spare=None,
        is_critical=isinstance(status, dict) and status.get("passed") is False,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _share(percent: Any) -> float | None:
    count = _count(percent)
    return None if count is None else count / 100
