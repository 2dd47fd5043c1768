"""Checks of a machine before a long run: each has a level, a text, and a fix where one is needed.

Files of the system are read below a `root`, so that tests use a tree of their own. Texts name no user, no
host and no path, so that they can be put into a bug report.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatrain.doctor.disk import BlockDevice
from megatrain.hardware.memory import GIB, host_memory
from megatrain.hardware.system_files import field_bytes, text_of
from megatrain.hardware.this_machine import Node, total_bytes
from megatrain.optim.threads import ThreadBudget

ROOT = Path("/")
_LITTLE_SHM_BYTES = GIB
_LITTLE_DISK_BYTES = 20 * 10**9
_NO_DISK_BYTES = 10**9
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
_REMOTE_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "ceph", "virtiofs"}


class Level(str, Enum):
    """The weight of a finding."""

    OK = "OK"
    WARN = "WARN"
    """Works, but slower, or not in every case."""
    FAIL = "FAIL"
    """A run will not work, or cannot be trusted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One finding."""

    name: str
    level: Level
    text: str
    fix: str = ""
    """The thing to do; empty only where nothing is to be done."""


def passed(name: str, text: str) -> Check:
    """Return a finding about which nothing is to be done."""
    return Check(name=name, level=Level.OK, text=text)


def warning(name: str, text: str, fix: str) -> Check:
    """Return a finding that makes runs slower, or fail in some cases."""
    return Check(name=name, level=Level.WARN, text=text, fix=fix)


def failed(name: str, text: str, fix: str) -> Check:
    """Return a finding with which a run will not work, or cannot be trusted."""
    return Check(name=name, level=Level.FAIL, text=text, fix=fix)


def check_memory(root: Path = ROOT) -> Check:
    """Compare what this process may take with what the machine has."""
    total, limit = total_bytes(root), host_memory(root)
    text = f"{_gib(limit.available_bytes)} may be taken now; the machine has {_gib(total)}"
    if limit.source.startswith("cgroup") and limit.available_bytes < 0.8 * total:
        return warning(
            "host memory",
            f"{text}; a control group limits it",
            "raise the container's limit (docker run --memory=..., or MemoryMax= of its systemd unit)",
        )
    if limit.available_bytes < 0.5 * total:
        return warning(
            "host memory",
            f"{text}; other processes hold the rest",
            "stop what else runs here: the state of a model wants nearly all memory",
        )
    return passed("host memory", text)


def check_swap(root: Path = ROOT) -> Check:
    """Say whether memory may be swapped out, and is."""
    total, free = (field_bytes(root / "proc/meminfo", field) for field in ("SwapTotal", "SwapFree"))
    if not total:
        return passed("swap", "off")
    used = total - (free or 0)
    return warning(
        "swap",
        f"{_gib(total)} on, {_gib(used)} in use",
        "swap turns a run that is too large into one that is 100 times slower: sudo swapoff -a, or give "
        "the run no swap (docker run --memory-swap equal to --memory, MemorySwapMax=0)",
    )


def check_lockable(on_gpu: bool, limit: int | None = None) -> Check:
    """Say how much memory may be locked.

    Args:
        on_gpu: whether copies to a GPU want it.
        limit: bytes, -1 for none; None: this process's.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return passed("lockable memory", "no limit")
    text = f"{_gib(limit)} by RLIMIT_MEMLOCK"
    if not on_gpu:
        return passed("lockable memory", f"{text}; nothing is locked without a GPU")
    return warning(
        "lockable memory",
        f"{text}; drivers that obey it cannot lock a model's weights, and their copies are slower",
        "ulimit -l unlimited, memlock in /etc/security/limits.conf, or docker run --ulimit memlock=-1",
    )


_SHARED_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def check_huge_pages(root: Path = ROOT) -> Check:
    """Say whether the arenas of a model get huge pages, and those that several ranks share."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    texts = (text_of(folder / name) for name in ("enabled", "shmem_enabled"))
    chosen, shared = (re.search(r"\[(\w+)\]", text) for text in texts)
    if chosen is None:
        return passed("huge pages", "the system does not tell")
    if chosen[1] != "never":
        text = f"transparent, {chosen[1]}"
        if shared is not None and shared[1] in ("never", "deny"):
            text += f"; none for what several ranks share: echo advise | sudo tee {_SHARED_PAGES}"
        return passed("huge pages", text)
    return warning(
        "huge pages",
        "off: more of each update's time goes into looking up pages",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def check_nodes(nodes: Sequence[Node], allowed: frozenset[int], device_node: int | None = None) -> Check:
    """Say which NUMA nodes this process runs on, and whether that is where its device is.

    Args:
        nodes: of the machine.
        allowed: CPUs of this process.
        device_node: of the device; None: no device, or not told.
    """
    own = [node for node in nodes if node.kind == "dram" and node.cpus & allowed]
    sizes = ", ".join(f"{node.number}: {node.kind} {_gib(node.nbytes)}" for node in nodes)
    text = f"{len(nodes)} ({sizes})" if len(nodes) > 1 else "1"
    if len(own) <= 1 or device_node is None or device_node < 0:
        return passed("NUMA nodes", text)
    return warning(
        "NUMA nodes",
        f"{text}; this process runs on {len(own)}, and the device is at node {device_node}",
        f"a model that fits into one node's memory copies faster from there: numactl "
        f"--cpunodebind={device_node} --membind={device_node} megatrain train ...",
    )


def check_threads(budget: ThreadBudget, omp_num_threads: str | None) -> Check:
    """Say how many threads update and compute.

    Args:
        budget: of the updates.
        omp_num_threads: the environment's; None: not set.
    """
    text = budget.describe().removeprefix("threads: ")
    if omp_num_threads is None or budget.cores == 1:
        return passed("threads", text)
    text = f"{text}; OMP_NUM_THREADS={omp_num_threads}"
    few = omp_num_threads.isdecimal() and int(omp_num_threads) < budget.num_threads
    if not few:
        return passed("threads", text)
    return warning(
        "threads",
        f"{text}: updates ignore it, but torch on the CPU obeys it",
        "unset OMP_NUM_THREADS, unless the machine is busy with other work (torchrun sets it to 1)",
    )


def check_shm(root: Path = ROOT) -> Check:
    """Say how large shared memory is."""
    try:
        nbytes = shutil.disk_usage(root / "dev/shm").total
    except OSError:
        return passed("/dev/shm", "none here; one process does not use it")
    if nbytes >= _LITTLE_SHM_BYTES:
        return passed("/dev/shm", _gib(nbytes))
    return warning(
        "/dev/shm",
        f"{_gib(nbytes)}; one GPU is unaffected, other programs' data loaders are not",
        "docker run --shm-size=8g",
    )


def check_disk(path: Path, drive: BlockDevice, free: int | None = None) -> list[Check]:
    """Say what is below the run directory: room, kind, wear.

    Args:
        path: the directory, which need not exist yet.
        drive: below it.
        free: free bytes; None: ask the system.
    """
    existing = next(level for level in (path, *path.absolute().parents) if level.is_dir())
    where = f"{drive.file_system} on {drive.name}" + (f" ({drive.model})" if drive.model else "")
    where += "" if existing == path else f", to be made in {existing}"
    free = shutil.disk_usage(existing).free if free is None else free
    name, text = "run directory", f"{where}; {_gb(free)} free"
    if not os.access(existing, os.W_OK | os.X_OK):
        fix = "give another with --path (train: out=DIR), or change its owner"
        room = failed(name, f"{where}; it cannot be written", fix)
    elif free >= _LITTLE_DISK_BYTES:
        room = passed(name, text)
    else:
        fix = (
            "a checkpoint takes 12 bytes per parameter, and two are kept: make room, or give another with "
            "--path (train: out=DIR)"
        )
        room = (failed if free < _NO_DISK_BYTES else warning)(name, text, fix)
    return [room, _check_kind(drive), _check_wear(drive)]


def _check_kind(drive: BlockDevice) -> Check:
    name = "drive"
    if drive.file_system in _MEMORY_FILE_SYSTEMS:
        return warning(
            name,
            f"{drive.file_system}: files are in host memory, and lost when the machine stops",
            "give a directory on a drive with --path (train: out=DIR)",
        )
    if drive.file_system in _REMOTE_FILE_SYSTEMS:
        return warning(
            name,
            f"{drive.file_system}: not local",
            "checkpoints may go there; for state on NVMe, give a local directory",
        )
    if drive.is_rotational:
        return warning(
            name,
            "a turning disk",
            "checkpoints may go there; state on it would take hours per step: use an NVMe drive",
        )
    kind = "NVMe" if drive.name.startswith("nvme") else "not rotating" if drive.is_rotational is False else ""
    return passed(name, kind or "its kind is not told")


def _check_wear(drive: BlockDevice) -> Check:
    name = "drive wear"
    written = "" if drive.written_bytes is None else f"{_gb(drive.written_bytes)} written since start-up; "
    if drive.life_used is None:
        return passed(name, f"{written}endurance is not told (sudo nvme smart-log shows percentage_used)")
    if drive.life_used < 0.8:
        return passed(name, f"{written}{drive.life_used:.0%} of its life used")
    return warning(
        name,
        f"{written}{drive.life_used:.0%} of its rated life used",
        "keep no state of a run on this drive, and copies of its checkpoints elsewhere",
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.1f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / 2**20:,.1f} MiB"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
