"""Host memory: what this process may still take, of the machine and of every cgroup, and how fast it is."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megatrain.hardware.system_files import field_bytes, number_of, text_of

GIB = 1 << 30

_M_MMAP_THRESHOLD = -3
"""The number of this option in glibc's malloc.h."""

_MAPPED_BYTES = 1 << 20


_CGROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "(?:in)?active"),
    (
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_(?:in)?active",
    ),
)
"""The controller of control groups of version 2 and 1, their mount, and what their files are called."""
_UNLIMITED_BYTES = 1 << 60
"""The bytes from which a limit is none: version 1 writes "no limit" as a huge number."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The bytes that this process may still take, and what says so."""

    available_bytes: int
    source: str


def host_memory(root: Path = Path("/")) -> MemoryLimit:
    """Return the tightest of the machine's available memory, cgroup limits above this process, and its own.

    Page cache counts as available: the kernel gives it up before it refuses memory.
    """
    limits = [_machine(root), *_cgroups(root), *_own_limits(root)]
    return min(limits, key=lambda limit: limit.available_bytes)


def memory_rate(cpus: frozenset[int], *, num_threads: int, nbytes: int, seconds: float) -> float:
    """Return bytes/s, read and written together, of copies by threads that run on `cpus`.

    Each thread is bound to `cpus` before it touches its two buffers of `nbytes`, so that the system gives it
    memory of their node. Where the system does not let it bind them, they run where they are.
    """
    import numpy

    start, rates = threading.Barrier(num_threads), [0.0] * num_threads

    def copy(index: int) -> None:
        if cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus)  # of this thread alone
        source, target = numpy.ones(nbytes, numpy.uint8), numpy.ones(nbytes, numpy.uint8)
        start.wait()
        began_s, copied = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - began_s) < seconds or copied == 0:
            target[:] = source
            copied += 2 * nbytes
        rates[index] = copied / elapsed_s

    workers = [threading.Thread(target=copy, args=(index,)) for index in range(num_threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(rates)


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
    available = field_bytes(root / "proc/meminfo", "MemAvailable")
    if available is not None:
        return MemoryLimit(available, "MemAvailable of the machine")
    # no /proc on this system, so what is free is not known: the whole memory is the only bound
    return MemoryLimit(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "memory of the machine")


def _cgroups(root: Path) -> Iterator[MemoryLimit]:
    groups = [line.split(":", 2) for line in text_of(root / "proc/self/cgroup").splitlines()]
    for controller, mount, most, now, cached in _CGROUPS:
        own = [Path(path.lstrip("/")) for _, names, path in groups if controller in names.split(",")][:1]
        for path in chain(own, *(each.parents for each in own)):
            group = root / mount / path
            limit, used = number_of(group / most), number_of(group / now)
            if limit is not None and used is not None and limit < _UNLIMITED_BYTES:
                pages = re.findall(rf"^{cached}_file (\d+)$", text_of(group / "memory.stat"), re.MULTILINE)
                left = limit - used + sum(map(int, pages))
                yield MemoryLimit(max(0, left), f"cgroup limit /{path}")


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
        used = field_bytes(root / "proc/self/status", field)
        if used is not None:
            limits.append(MemoryLimit(max(0, limit - used), name))
    return limits


def resident_bytes(root: Path = Path("/")) -> int:
    """Return the anonymous and shared memory of this process, 0 where the system does not say."""
    status = root / "proc/self/status"
    return sum(field_bytes(status, field) or 0 for field in ("RssAnon", "RssShmem"))
