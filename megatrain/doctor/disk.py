"""The drive below a directory, and what the system tells of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatrain.filesystems import filesystem_of_device
from megatrain.hardware.system_files import text_of

ROOT = Path("/")
_SECTOR = 512
"""Bytes of the unit of `/sys/block/*/stat`, whatever the drive's own is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDevice:
    """A drive, or what stands for one."""

    name: str
    """The kernel's name of the drive; the file system's type where there is none."""
    file_system: str
    model: str
    """The model of the drive; empty where it is not told."""
    is_rotational: bool | None
    """Whether the drive turns; None: there is no drive."""
    written_bytes: int | None
    """Bytes that the whole machine has written since it was started."""
    life_used: float | None
    """Part of the rated life; None: not readable from `/sys`."""


def block_device(path: Path, root: Path = ROOT, number: tuple[int, int] | None = None) -> BlockDevice:
    """Describe the drive of a directory, or of the nearest one above it that exists.

    Args:
        path: the directory.
        root: of the file system that `/proc` and `/sys` are read from.
        number: major and minor device number; None: those of `path`.
    """
    if number is None:
        existing = next((level for level in (path, *path.absolute().parents) if level.exists()), Path("/"))
        device = os.stat(existing).st_dev
        number = os.major(device), os.minor(device)
    file_system = filesystem_of_device(number, root)
    folder = _disk(root / f"sys/dev/block/{number[0]}:{number[1]}")
    if folder is None:
        return BlockDevice(
            name=file_system,
            file_system=file_system,
            model="",
            is_rotational=None,
            written_bytes=None,
            life_used=None,
        )
    rotational = text_of(folder / "queue/rotational")
    return BlockDevice(
        name=folder.name,
        file_system=file_system,
        model=text_of(folder / "device/model"),
        # a virtual disk says that it turns, whatever is below it
        is_rotational=rotational == "1" and not folder.name.startswith("vd") if rotational else None,
        written_bytes=_written(folder),
        life_used=_life_used(folder),
    )


def _disk(link: Path) -> Path | None:
    """Return the folder of the whole disk: of a partition its parent, of a mapping what it maps to."""
    if not link.exists():
        return None
    folder = link.resolve()
    below = sorted((folder / "slaves").glob("*"))
    if below:
        folder = below[0].resolve()
    return folder.parent if (folder / "partition").exists() else folder


def _written(folder: Path) -> int | None:
    fields = text_of(folder / "stat").split()
    return int(fields[6]) * _SECTOR if len(fields) > 6 and fields[6].isdigit() else None


def _life_used(folder: Path) -> float | None:
    """Return the larger of the two estimates of eMMC and UFS drives, in steps of a tenth.

    NVMe drives tell theirs by a command that takes an administrator's rights (`nvme smart-log`).
    """
    estimates = text_of(folder / "device/life_time").split()
    tenths = [int(text, 16) for text in estimates if text.startswith("0x") and text[2:].isalnum()]
    return max(tenths) / 10 if any(tenths) else None
