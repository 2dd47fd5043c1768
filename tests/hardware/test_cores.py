"""Cores of machines that are trees of files, as the kernel describes them, and how processes share them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from megatrain.hardware.cores import cpu_list, numa_nodes, own_part, physical_cores


def make_system(root: Path, cores: Iterable[tuple[int, tuple[int, ...]]]) -> Path:
    """Describe cores by their socket, each a NUMA node, and their CPUs."""
    of_socket: dict[int, set[int]] = {}
    for number, (socket, cpus) in enumerate(cores):
        of_socket.setdefault(socket, set()).update(cpus)
        for cpu in cpus:
            topology = root / f"cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{socket}\n")
            (topology / "core_id").write_text(f"{number}\n")
            (topology / "thread_siblings_list").write_text(",".join(map(str, cpus)) + "\n")
    for socket, found in of_socket.items():
        (root / f"node/node{socket}").mkdir(parents=True)
        (root / f"node/node{socket}/cpulist").write_text(",".join(map(str, sorted(found))) + "\n")
    (root / "node/node9").mkdir()
    (root / "node/node9/cpulist").write_text("\n")  # memory without CPUs
    return root


def two_sockets(root: Path) -> Path:
    """Describe 2 x 56 cores with two threads each, numbered as Linux does: all second threads at last."""
    return make_system(root, ((core // 56, (core, core + 112)) for core in range(112)))


def one_socket(root: Path) -> Path:
    """Describe 8 cores of two threads, which are numbered side by side."""
    return make_system(root, ((0, (2 * core, 2 * core + 1)) for core in range(8)))


def plain(root: Path) -> Path:
    """Describe 2 cores of a virtual machine, which has told nothing of them."""
    return root


def spans(cpus: set[int]) -> str:
    """Write CPUs as the kernel does."""
    starts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    ends = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    pairs = zip(starts, ends, strict=True)
    return ",".join(f"{one}" if one == other else f"{one}-{other}" for one, other in pairs)


@pytest.mark.parametrize(
    ("machine", "allowed", "number", "parts"),
    [
        (
            two_sockets,
            "0-223",
            8,
            [f"{14 * rank}-{14 * rank + 13},{112 + 14 * rank}-{112 + 14 * rank + 13}" for rank in range(8)],
        ),
        (two_sockets, "0-223", 2, ["0-55,112-167", "56-111,168-223"]),
        (two_sockets, "0-27,56-83", 4, ["0-13", "14-27", "56-69", "70-83"]),  # of each core one thread
        (two_sockets, "0-11,56-59,112-123", 4, ["0-3,112-115", "4-7,116-119", "8-11,120-123", "56-59"]),
        (two_sockets, "1-2,4-6,57-60,62,113-114,116-118", 2, ["1-2,4-6,113-114,116-118", "57-60,62"]),
        (one_socket, "0-15", 4, ["0-3", "4-7", "8-11", "12-15"]),
        (one_socket, "0-3", 4, ["0", "1", "2", "3"]),
        (one_socket, "0,2-3,5", 2, ["0", "2-3,5"]),
        (plain, "0-1", 4, ["0", "0", "1", "1"]),
        (plain, "0-3", 8, ["0", "0", "1", "1", "2", "2", "3", "3"]),
        (plain, "5", 2, ["5", "5"]),
    ],
    ids=[
        "8 of 2 sockets",
        "2 of 2 sockets",
        "one thread of each core",
        "limited by a control group",
        "cores that are offline",
        "one socket",
        "threads, where there are too few cores",
        "a core that has one thread left",
        "4 on 2 cores",
        "8 on 4 cores",
        "one core",
    ],
)
def test_processes_have_parts_of_one_size_whose_cores_are_whole_and_of_one_socket(
    tmp_path: Path, machine: object, allowed: str, number: int, parts: list[str]
) -> None:
    system = machine(tmp_path)  # type: ignore[operator]
    cpus = cpu_list(allowed)
    found = [own_part(cpus, place, number, system) for place in range(number)]
    assert [spans(part) for part in found] == parts
    assert set().union(*found) == cpus


def test_cores_and_nodes_are_those_of_the_system(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    assert physical_cores({0, 1, 112, 57}, tmp_path) == [[0, 112], [1], [57]]
    assert numa_nodes({0, 1}, tmp_path) == [{*range(56), *range(112, 168)}]
    assert len(numa_nodes({0, 111}, tmp_path)) == 2


def test_a_system_that_hides_itself_has_as_many_cores_as_cpus(tmp_path: Path) -> None:
    assert physical_cores({8, 9}, tmp_path) == [[8], [9]]
    assert numa_nodes({8, 9}, tmp_path) == []


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8-9\n", {0, 1, 2, 3, 8, 9}), ("5", {5}), ("\n", set()), ("0,2,4-4", {0, 2, 4})],
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert cpu_list(text) == cpus
