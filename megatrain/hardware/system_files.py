"""Reader of the small files in which the kernel describes the machine and this process."""

from __future__ import annotations

import re
from pathlib import Path


def text_of(path: Path) -> str:
    """Return a file's text, empty where there is none: not Linux, or hidden by the container."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number_of(path: Path) -> int | None:
    """Return the whole number that is all of a file; None for any other file."""
    text = text_of(path)
    return int(text) if text.removeprefix("-").isdecimal() else None


def field_bytes(path: Path, field: str) -> int | None:
    """Return a field of a table of kB, such as `/proc/meminfo`, in bytes; None if it is not there."""
    found = re.search(rf"^{field}:\s+(\d+) kB", text_of(path), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
