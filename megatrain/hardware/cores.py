"""The CPUs that this process may use: what cores, sockets and NUMA nodes they make up, and who has which."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from megatrain.hardware.system_files import number_of, text_of

SYSTEM = Path("/sys/devices/system")


def allowed_cpus() -> frozenset[int]:
    """Return the numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_list(text: str) -> frozenset[int]:
    """Read a list of CPUs as the kernel writes it: `0-3,8-11`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def numa_nodes(cpus: Iterable[int], system: Path = SYSTEM) -> list[frozenset[int]]:
    """Return the CPUs of each NUMA node that has one of `cpus`; a node of memory alone has none."""
    wanted, found = set(cpus), {}
    for path in system.glob("node/node[0-9]*/cpulist"):
        found[int(path.parent.name.removeprefix("node"))] = cpu_list(text_of(path))
    return [found[number] for number in sorted(found) if not wanted.isdisjoint(found[number])]


def physical_cores(cpus: Iterable[int], system: Path = SYSTEM) -> list[list[int]]:
    """Group CPUs by core: threads of one core share its units and its way to memory.

    Args:
        cpus: The numbers of the CPUs.
        system: The directory in which the kernel describes the CPUs.

    Returns:
        The CPUs of each core. The cores of a socket are behind one another, and in it those of a NUMA node.
    """
    node_of = {cpu: number for number, node in enumerate(numa_nodes(cpus, system)) for cpu in node}
    cores: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for cpu in sorted(cpus):
        topology = system / "cpu" / f"cpu{cpu}" / "topology"
        siblings = min(cpu_list(text_of(topology / "thread_siblings_list")), default=cpu)
        socket = number_of(topology / "physical_package_id") or 0
        cores[socket, node_of.get(cpu, 0), siblings].append(cpu)
    return [cores[place] for place in sorted(cores)]


def own_part(cpus: Iterable[int], place: int, number: int, system: Path = SYSTEM) -> set[int]:
    """Return the part of CPUs that one of several processes has for itself.

    Whole cores that follow one another in a socket are kept together. Where there are fewer cores than
    processes, their threads are shared out, and where these are too few, as many processes have each.

    Args:
        cpus: The numbers of the CPUs of all these processes.
        place: The place of this process among them.
        number: The number of processes.
        system: The directory in which the kernel describes the CPUs.
    """
    parts = physical_cores(cpus, system)
    if len(parts) < number:
        parts = [[cpu] for cpu in chain.from_iterable(parts)]
    first, last = (which * len(parts) // number for which in (place, place + 1))
    return set(chain.from_iterable(parts[first : max(last, first + 1)]))
