"""What a process may take of host memory: the tightest of everybody's limits."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.hardware import MemoryLimit, host_memory, memory
from tests.forks import run_script

CODE = """
import resource
resource.setrlimit(resource.{kind}, ({limit}, {limit}))
from megatrain.hardware import host_memory
found = host_memory()
print(found.available_bytes, found.source)
"""


@pytest.mark.parametrize(("kind", "source"), [("RLIMIT_AS", "ulimit -v"), ("RLIMIT_DATA", "ulimit -d")])
def test_own_limits_count(kind: str, source: str) -> None:
    limit = 1 << 30
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(kind=kind, limit=limit)],
        capture_output=True,
        text=True,
        check=True,
    )
    available, _, found = done.stdout.strip().partition(" ")
    assert found == source
    assert 0 < int(available) < limit


def test_a_cgroup_s_limit_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": "500000000\n",
        "sys/fs/cgroup/job/memory.current": "200000000\n",
        "sys/fs/cgroup/job/memory.stat": "inactive_file 30000000\nactive_file 20000000\nanon 5\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = host_memory(tmp_path)
    assert (found.available_bytes, found.source) == (350_000_000, "cgroup limit /job")


def test_what_was_freed_is_given_back_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    monkeypatch.setattr(memory, "give_back_freed", lambda: given.append(True))
    monkeypatch.setattr(memory, "host_memory", lambda: MemoryLimit(1000, "a test"))
    memory.give_back_where_short(1000)
    assert given == []
    memory.give_back_where_short(1001)
    assert given == [True]


HOLES = """
import sys, torch
from megatrain.hardware.memory import resident_bytes, unmap_freed_tensors
if sys.argv[1] == "unmaps":
    unmap_freed_tensors()
del_me = torch.ones(7 << 20)  # 28 MiB: freed, it moves the bound of glibc
del del_me
before = resident_bytes()
kept = [(torch.ones(1 << 21), torch.ones(1 << 14)) for _ in range(24)]
kept = [small for _, small in kept]
print((resident_bytes() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
@pytest.mark.parametrize(("how", "least", "most"), [("unmaps", 0, 24), ("keeps", 48, 250)])
def test_freed_tensors_leave_no_holes(how: str, least: int, most: int) -> None:
    """Of 24 tensors of 8 MiB, each before a small one that stays, the memory goes back or does not.

    How much of it does not depends on the holes that the heap has already: a longer path moves it by 17 MiB.
    """
    done = run_script(HOLES, how)
    assert done.returncode == 0, done.stderr
    assert least <= int(done.stdout) <= most
