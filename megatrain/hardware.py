"""What this machine has: host memory that this process may still take, and how fast its device multiplies."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """How many bytes more this process may take, and what says so."""

    available_bytes: int
    source: str


def host_memory(root: Path = Path("/")) -> MemoryLimit:
    """Return the tightest of the machine's available memory and every cgroup limit above this process.

    Page cache counts as available: the kernel gives it up before it refuses memory.
    """
    limits = [_machine(root), *_cgroup_v2(root), *_cgroup_v1(root)]
    return min(limits, key=lambda limit: limit.available_bytes)


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


def measure_matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product, measured once per process: what 100 % of MFU means.

    It is what the device reaches here, with the threads and settings of now, and not what its vendor
    promises. Takes up to 0.2 s on a CPU and 1 s on a GPU, and 0.8 GB there at most; waits for the device, so
    it is not for the inside of a step. Draws from no generator of the caller's.
    """
    import torch

    return _matmul_peak(device, dtype, torch.get_num_threads(), torch.get_float32_matmul_precision())


@cache
def _matmul_peak(device: torch.device, dtype: torch.dtype, num_threads: int, precision: str) -> float:
    """Double the size until a product takes long enough to show the peak, then take the best of a few."""
    import torch

    is_cpu = device.type == "cpu"
    size, largest, long_enough_s, budget_s = (512, 2048, 4e-3, 0.1) if is_cpu else (2048, 8192, 1e-3, 0.5)
    if not is_cpu and torch.cuda.mem_get_info(device)[0] < 1 << 30:
        largest = 4096
    generator = torch.Generator(device).manual_seed(0)
    started_s, best = time.perf_counter(), 0.0
    with torch.no_grad():
        while True:
            # random: a product of constants switches fewer transistors, and runs faster than any real one
            left, right = (
                torch.randn(size, size, generator=generator, dtype=dtype, device=device) for _ in range(2)
            )
            # as a linear layer multiplies, and as its weight's gradient does: one may be many times faster
            pairs = [(left, right.t()), (left.t(), right)]
            seconds = min(_product_s(*pair) for pair in pairs)
            best = max(best, 2 * size**3 / seconds)
            if size >= largest or seconds >= long_enough_s:
                break
            size *= 2
        while time.perf_counter() - started_s < budget_s:
            best = max(best, *(2 * size**3 / _product_s(*pair) for pair in pairs))
    if not is_cpu:
        del left, right, pairs
        torch.cuda.empty_cache()  # an engine that fills the device asks what is free
    return best


def _product_s(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the seconds of a product: of one on a CPU, of each of some on a device that runs behind."""
    repeats = 1 if left.device.type == "cpu" else 4
    _synchronize(left)
    began_s = time.perf_counter()
    for _ in range(repeats):
        left.mm(right)
    _synchronize(left)
    return (time.perf_counter() - began_s) / repeats


def _synchronize(tensor: torch.Tensor) -> None:
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
