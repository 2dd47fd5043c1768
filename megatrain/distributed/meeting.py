"""What processes tell each other in the store where they meet, before any of them connects to another one.

Each says who it is, and waits for all. The first one looks at what they have said, and finds what is wrong.
So all of them end in its sentence, and none waits for another one's end.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from megatrain.errors import ConfigError
from megatrain.hardware.accelerators import VENDORS, identities, own_index, rank_kind
from megatrain.hardware.cores import allowed_cpus, own_part
from megatrain.versions import versions_of

if TYPE_CHECKING:
    from torch.distributed import Store

_JUDGED = "megatrain/judged"
_DEVICE = "train.device"
"""Of the facts: the kind of accelerator, or `cpu`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comer:
    """What a process says of itself."""

    host: str
    facts: Mapping[str, str]
    """What is the same for all."""
    address: str | None
    """Of its machine, by which others reach it; None: it does not know."""
    cpus: Sequence[int]
    """That it may use."""
    devices: Sequence[str]
    """Accelerators that it sees, by what no other one is called."""
    problem: str = ""
    """Why it cannot go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Met:
    """What a process knows of the others once all have come."""

    local: Sequence[Comer]
    """Those of its node, in their order."""
    local_rank: int
    far: Comer | None = None
    """One of another node; None: there is none."""

    @property
    def own(self) -> Comer:
        """This process itself."""
        return self.local[self.local_rank]


def this_process(device: str, address: str | None) -> Comer:
    """Describe this process.

    Args:
        device: The device on which the run computes, by `train.device`.
        address: The address of this process, as in `Comer`.
    """
    kind, devices, problem = "cpu", [], ""
    try:
        kind = rank_kind(device) or "cpu"
        devices = identities(kind) if kind in VENDORS else []
    except ConfigError as error:
        problem = str(error)
    facts = versions_of(("megatrain", "torch", "transformers"))
    return Comer(
        host=socket.gethostname(),
        facts=facts | {_DEVICE: kind},
        address=address,
        cpus=sorted(allowed_cpus()),
        devices=devices,
        problem=problem,
    )


def meet(store: Store, mine: Comer, rank: int, size: int, local_size: int) -> Met:
    """Wait until all processes have said who they are, and that they fit together.

    Args:
        store: The store where the processes meet.
        mine: This process.
        rank: The rank of this process.
        size: The number of all processes.
        local_size: The number of processes on each node.

    Raises:
        ConfigError: A process has not come in the time that the store waits, or has a problem, or another
            version.
    """
    store.set(_came(rank), json.dumps(asdict(mine)))
    try:
        store.wait([_came(one) for one in range(size)])
    except RuntimeError as error:
        late = [one for one in range(size) if not store.check([_came(one)])]
        raise ConfigError(
            f"of {size} ranks {_listed(late)} did not come; look at what was said where they were started, "
            "and give them longer (parallel.timeout) if they were only late"
        ) from error
    if rank == 0:
        store.set(_JUDGED, problem_of(_read(store, range(size)), local_size))
    local_rank = rank % local_size
    refuse(store.get(_JUDGED).decode(), local_rank)
    local = _read(store, range(rank - local_rank, rank - local_rank + local_size))
    other = 0 if rank >= local_size else local_size
    far = _read(store, [other])[0] if other < size and size > local_size else None
    return Met(local=local, local_rank=local_rank, far=far)


def share_cores(met: Met) -> None:
    """Keep this process to its part of the cores, which those of its node share that may use the same ones.

    Where a launcher has given each of them cores of its own, they keep these.
    """
    if hasattr(os, "sched_setaffinity"):
        alike = [place for place, one in enumerate(met.local) if one.cpus == met.own.cpus]
        os.sched_setaffinity(0, own_part(met.own.cpus, alike.index(met.local_rank), len(alike)))


def take_device(met: Met) -> str:
    """Make this process's accelerator the current one; return its kind, or `cpu`."""
    import torch

    kind = met.own.facts[_DEVICE]
    if kind in VENDORS:
        index = own_index(kind, [one.devices for one in met.local], met.local_rank)
        torch.accelerator.set_device_index(index)
    return kind


def backend_of(kind: str) -> str:
    """Return the backend for tensors of the host, and of a kind of accelerator, if that has one."""
    collectives = VENDORS[kind].collectives if kind in VENDORS else None
    return "cpu:gloo" if collectives is None else f"cpu:gloo,{kind}:{collectives}"


def _came(rank: int) -> str:
    return f"megatrain/came/{rank}"


def _read(store: Store, ranks: Sequence[int]) -> list[Comer]:
    return [Comer(**json.loads(text)) for text in store.multi_get([*map(_came, ranks)])]


def refuse(problem: str, local_rank: int) -> None:
    """End a process that cannot train with the others, if there is a problem; the first of a node says it."""
    if problem:
        error = ConfigError(problem)
        error.is_told = local_rank > 0
        raise error


def problem_of(comers: Sequence[Comer], local_size: int) -> str:
    """Say why processes, of which each node has as many, cannot train together; empty: they can."""
    first = comers[0]
    for rank, comer in enumerate(comers):
        if comer.problem:
            return f"rank {rank} on {comer.host}: {comer.problem}"
        for name, value in comer.facts.items():
            if value != first.facts[name]:
                return (
                    f"rank {rank} on {comer.host} has {name} {value}, and rank 0 on {first.host} has "
                    f"{first.facts[name]}; ranks need the same"
                )
    kind = first.facts[_DEVICE]
    if kind in VENDORS:
        for start in range(0, len(comers), local_size):
            try:
                own_index(kind, [one.devices for one in comers[start : start + local_size]], 0)
            except ConfigError as error:
                return f"{comers[start].host}: {error}"
    return ""


def _listed(ranks: Sequence[int]) -> str:
    most = 8
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more
