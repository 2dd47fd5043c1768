"""Host memory that this process may still take: of the machine, and of every cgroup above the process."""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30

_M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""

_MAPPED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """How many bytes more this process may take, and what says so."""

    available_bytes: int
    source: str


def host_memory(root: Path = Path("/")) -> MemoryLimit:
    """Return the tightest of the machine's available memory, cgroup limits above this process, and its own.

    Page cache counts as available: the kernel gives it up before it refuses memory.
    """
    limits = [_machine(root), *_cgroup_v2(root), *_cgroup_v1(root), *_own_limits(root)]
    return min(limits, key=lambda limit: limit.available_bytes)


def give_back_freed() -> None:
    """Give the system what malloc keeps of memory that was freed, as far as the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def unmap_freed_tensors() -> None:
    """Let malloc map each block of a MiB or more by itself, so that its memory goes back when freed.

    glibc raises that bound itself, up to 32 MiB, as such blocks are freed (`mallopt(3)`: M_MMAP_THRESHOLD).
    Activations are smaller than that, and then lie in heaps, whose holes stay with the process: three layers
    of a 0.5 B model peaked 0.7 GiB above their tensors. Other C libraries are left alone, and so is whoever
    has set MALLOC_MMAP_THRESHOLD_.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def give_back_where_short(room: int) -> None:
    """Call `give_back_freed` if less than this many bytes are left.

    Where there is room, malloc's own memory is sooner there again: to give it back at every block took two
    ranks 8 % of a step.
    """
    if host_memory().available_bytes < room:
        give_back_freed()


def _machine(root: Path) -> MemoryLimit:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
        return MemoryLimit(fields["MemAvailable"] * 1024, "MemAvailable of the machine")
    except (OSError, KeyError, ValueError):
        # no /proc on this system, so what is free is not known: the whole memory is the only bound
        return MemoryLimit(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "memory of the machine")


def _cgroup_v2(root: Path) -> list[MemoryLimit]:
    path = _own_group(root, "0::")
    mount = root / "sys/fs/cgroup"
    limits = []
    while path is not None:
        group = mount / path
        limit = _number(group / "memory.max")
        used = _number(group / "memory.current")
        if limit is not None and used is not None:
            cache = _stat(group / "memory.stat", ("inactive_file", "active_file"))
            limits.append(MemoryLimit(max(0, limit - used + cache), f"cgroup limit /{path}"))
        path = path.parent if path != path.parent else None
    return limits


def _cgroup_v1(root: Path) -> list[MemoryLimit]:
    path = _own_group(root, "memory:")
    mount = root / "sys/fs/cgroup/memory"
    limits = []
    while path is not None:
        group = mount / path
        limit = _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.usage_in_bytes")
        if (
            limit is not None and used is not None and limit < 1 << 60
        ):  # v1 writes "no limit" as a huge number
            cache = _stat(group / "memory.stat", ("total_inactive_file", "total_active_file"))
            limits.append(MemoryLimit(max(0, limit - used + cache), f"cgroup limit /{path}"))
        path = path.parent if path != path.parent else None
    return limits


def _own_limits(root: Path) -> list[MemoryLimit]:
    """Return what `ulimit -v` and `ulimit -d` leave of the process's address space and of its data."""
    limits = []
    for kind, field, name in (
        (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
        (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit == resource.RLIM_INFINITY:
            continue
        used = _status_kib(root, field)
        if used is not None:
            limits.append(MemoryLimit(max(0, limit - 1024 * used), name))
    return limits


def resident_bytes(root: Path = Path("/")) -> int:
    """Return the anonymous and shared memory of this process, 0 where the system does not say."""
    return 1024 * sum(_status_kib(root, field) or 0 for field in ("RssAnon", "RssShmem"))


def _status_kib(root: Path, field: str) -> int | None:
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)
    except (OSError, ValueError):
        return None


def _own_group(root: Path, marker: str) -> Path | None:
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if marker in line:
                return Path(line.split(":", 2)[2].lstrip("/"))
    except OSError:
        pass
    return None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None


def _stat(path: Path, keys: tuple[str, ...]) -> int:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return sum(int(value) for key, value in pairs if key in keys)
    except (OSError, ValueError):
        return 0
