"""The processes that train together, one rank each, and what they say to each other.

Nothing here adds numbers up: the reductions of NCCL and Gloo have no order that is the same for every number
of ranks. Parts are exchanged, and whoever owns them adds them, in the order of `Runs`.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.config.runs import require_power_of_two
from megatrain.distributed.processes import machine
from megatrain.distributed.signals import ignore_sigterm, ignore_sigterm_once
from megatrain.distributed.waits import WAITS
from megatrain.distributed.watch import Watch
from megatrain.errors import ConfigError

_OF_SOME = ("gather", "near", "rail", "spread", "sequence")
_LANES = (*(lane for lane in WAITS if lane not in _OF_SOME), "shares")
"""What goes on at the same time has a group of its own: the calls of one group keep one order. `gather` has
one of the ranks of a node; `near` and `spread` too. `rail` has one of those in one place on all nodes, and
`spread` has another. `shares` are gathered from all."""

_PATIENCE = timedelta(days=30)
"""How long Gloo waits. The watch knows sooner, and knows of a rank that evaluates or saves that it lives."""

_LOOK = timedelta(seconds=1)
"""How often a wait looks whether a rank is missing."""


class Ranks:
    """All ranks of a run; every method is called by each of them, in the same order for each lane.

    Those of a node follow one another, and the first one of a node does for it what is done once per node.
    """

    def __init__(
        self,
        store: dist.Store,
        timeout_s: float,
        *,
        local_size: int | None = None,
        backend: str | None = None,
    ) -> None:
        """Join the processes of `torch.distributed`, which is initialised.

        Args:
            store: The rendezvous store of these processes.
            timeout_s: The time for which a rank may be silent, or keep others waiting, before all end.
            local_size: Ranks of a node, as many on each; None: all are on one.
            backend: The backend of their exchanges, such as `backend_of` returns; None: the default one.

        Raises:
            ConfigError: The ranks are no power of two, or the nodes are not as said.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.gathers = False
        """Each fetches a piece of every block's weights, and they gather them; see `parallel.gather`."""
        require_power_of_two(self.size, f"{self.size} ranks train together")
        own: Any = store  # its stubs leave out `clone`
        self.watch = Watch(own.clone(), self.rank, self.size, timeout_s)
        self.watch.begin()
        with self.watch.waiting("caller"):
            self._settings: dict[str, Any] = {"timeout": _PATIENCE, "backend": backend}
            self._groups = {lane: dist.new_group(**self._settings) for lane in _LANES}
        self.local_size = local_size or self.size
        found = self.gather_values([machine(), self.local_size])
        if any(size != self.local_size for _, size in found) or self.size % self.local_size:
            sizes = sorted({size for _, size in found})
            raise ConfigError(
                f"nodes have {' and '.join(map(str, sizes))} of {self.size} ranks; start as many on each"
            )
        self.num_nodes = self.size // self.local_size
        self.node, self.local_rank = divmod(self.rank, self.local_size)
        self.watch.is_first_here = self.local_rank == 0
        nodes = [found[first : first + self.local_size] for first in range(0, self.size, self.local_size)]
        if any(len({machine for machine, _ in node}) > 1 for node in nodes):
            raise ConfigError(
                f"{self.local_size} ranks that follow one another share a node's memory, but they are on "
                "several machines; start the ranks with torchrun, which numbers them by node"
            )
        numbers = range(self.size)
        inside = [[*numbers[first : first + self.local_size]] for first in numbers[:: self.local_size]]
        across = [[*numbers[place :: self.local_size]] for place in range(self.local_size)]
        with self.watch.waiting("caller"):
            for lane in ("gather", "near", "spread"):
                self._groups[lane], _ = dist.new_subgroups_by_enumeration(inside, **self._settings)
            self._groups["rail"], _ = dist.new_subgroups_by_enumeration(across, **self._settings)
            self._across, _ = dist.new_subgroups_by_enumeration(across, **self._settings)

    def __enter__(self) -> Ranks:
        ignore_sigterm_once(lambda: self.watch.is_lost)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Take part no more; the others are left word of the error that this process ends with, if any."""
        if error is not None:
            _abandon_groups()
        self.watch.close(error)
        if self.watch.is_lost:
            ignore_sigterm()

    @property
    def have_given_up(self) -> bool:
        """Whether a rank is known to have given up the step that is going on."""
        return self.watch.has_given_up

    def begin_step(self) -> None:
        """Take note that a step begins, which a rank may give up."""
        self.watch.begin_step()

    def end_step(self) -> None:
        """Take note that it is over for this rank."""
        self.watch.end_step()

    def give_up(self) -> None:
        """Let the others know, about a second later, that this rank gives up the step."""
        self.watch.give_up()

    def exchange(self, mine: Tensor, counts: Sequence[int], lane: str, parts: Tensor) -> Tensor:
        """Send each rank its part of a flat tensor, and return the parts that all have sent to this one.

        Args:
            mine: (sum(counts),) of any dtype.
            counts: Elements for each rank of the lane's group.
            lane: `near`: ranks of a node; `rail`: those in this place on all nodes.
            parts: (len(counts) * own count,) where they come.

        Returns:
            (len(counts), own count) parts, in the order of ranks.
        """
        size, own = len(counts), counts[self.node if lane == "rail" else self.local_rank]
        sent = self._within_reach(mine, lane)
        found = parts if sent.device == parts.device else torch.empty_like(parts, device=sent.device)
        self._do(lane, dist.all_to_all_single, found, sent, [own] * size, list(counts))
        if found is not parts:
            parts.copy_(found)
        return parts.view(size, own)

    def neighbours(self, number: int) -> Neighbours:
        """Return this rank and those beside it that share out rows: each `number` ranks, in their order."""
        together = [[*range(first, first + number)] for first in range(0, self.size, number)]
        with self.watch.waiting("caller"):
            self._groups["sequence"], _ = dist.new_subgroups_by_enumeration(together, **self._settings)
        return Neighbours(number, self.rank % number, self)

    def swap(self, parts: Tensor) -> Tensor:
        """Give part n of a tensor to the n-th of `neighbours`; return what all gave this one."""
        sent = self._within_reach(parts, "sequence")
        found = torch.empty_like(sent)
        self._do("sequence", dist.all_to_all_single, found, sent)
        return found.to(parts.device)

    def gather(self, mine: Tensor, lane: str = "caller") -> list[Tensor]:
        """Return the tensors of all in a lane's group, in the order of ranks; they are equally long."""
        sent = self._within_reach(mine, lane)
        found = [torch.empty_like(sent) for _ in range(dist.get_world_size(self._groups[lane]))]
        self._do(lane, dist.all_gather, found, sent)
        return [each.to(mine.device) for each in found]

    def gather_pieces(self, whole: Tensor) -> None:
        """Make a flat tensor whole, of whose equal pieces each rank of the node has brought its own.

        Args:
            whole: (local_size * N,) of any dtype; this rank's N are in their place.
        """
        own = whole.numel() // self.local_size
        sent = self._within_reach(whole[self.local_rank * own : (self.local_rank + 1) * own], "gather")
        found = whole if sent.device == whole.device else torch.empty_like(whole, device=sent.device)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before 2.13
        self._do("gather", gather, found, sent)
        if found is not whole:
            whole.copy_(found)

    def gather_shares(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Bring parts, given by rank, from each rank to all others; they are flat bytes on the device."""
        found = [
            (part, self._within_reach(part, "shares"), rank)
            for rank, tensors in enumerate(parts)
            for part in tensors
        ]
        if not found:
            return
        group = self._groups["shares"]
        self._finish(
            "gather",
            found[0][1].device,
            lambda: [dist.broadcast(sent, rank, group, async_op=True) for _, sent, rank in found],
        )
        for part, sent, rank in found:
            if sent is not part and rank != self.rank:
                part.copy_(sent)

    def _within_reach(self, tensor: Tensor, lane: str) -> Tensor:
        """Return a tensor where a lane's group can send it from: itself, or a copy on the host."""
        kinds = {device.type for device in self._groups[lane]._device_types}
        return tensor if tensor.device.type in kinds else tensor.cpu()

    def gather_values(self, mine: Any, lane: str = "caller") -> list[Any]:
        """Return everybody's plain JSON value, in the order of ranks."""
        return [json.loads(text) for text in self.gather_bytes(json.dumps(mine).encode(), lane)]

    def gather_bytes(self, mine: bytes, lane: str = "caller") -> list[bytes]:
        """Return everybody's bytes, at least one of each, in the order of ranks."""
        text = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        sizes = [int(size) for size in self.gather(torch.tensor([text.numel()]), lane)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: text.numel()] = text
        found = zip(self.gather(padded, lane), sizes, strict=True)
        return [each[:size].numpy().tobytes() for each, size in found]

    def tell(self, value: Any = None) -> Any:
        """Return the first rank's plain JSON value; what the others give is not looked at."""
        return self.gather_values(value if self.rank == 0 else None, "orders")[0]

    def meet(self, lane: str = "caller") -> None:
        """Wait until every rank has come here; in lane `spread`, every one of the node."""
        self.gather(torch.zeros(1, dtype=torch.uint8), lane)  # a barrier would be the device's

    def _do(
        self, lane: str, collective: Callable[..., Any], found: Tensor | list[Tensor], *more: Any
    ) -> None:
        """Do a collective among the ranks of a lane, whose result comes into `found`.

        Raises:
            RankError: A rank is missing.
        """
        first = found if isinstance(found, Tensor) else found[0]
        group = self._groups[lane]
        self._finish(lane, first.device, lambda: [collective(found, *more, group=group, async_op=True)])

    def _finish(self, lane: str, device: torch.device, begin: Callable[[], Sequence[dist.Work]]) -> None:
        """Begin works, and wait for them as long as no rank is missing.

        On the host that is Gloo, and this thread waits. On an accelerator its current stream does: this
        returns at once, what the stream is given afterwards comes behind, and the watch sees whether the
        device gets there. NCCL is never given a time to wait. It would count from when a work was queued,
        whatever the device still has to do before, and end the communicator of one that takes longer.

        Args:
            lane: The name of the lane in which the works run.
            device: The device on which the works' tensors are.
            begin: The function that begins works of one backend, and returns them.

        Raises:
            RankError: A rank is missing.
        """
        with self.watch.waiting(lane):
            works = begin()
            if device.type != "cpu":
                for work in works:
                    work.wait()
                self.watch.launched(lane, _passed(device))
                return
            for work in works:
                while not work.is_completed():
                    with suppress(RuntimeError):  # not done yet, or failed: the last wait says so
                        work.wait(_LOOK)
                    self.watch.look()
                work.wait()

    def spread(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Bring what each node has to the others, between the ranks that have the same place on their nodes.

        Args:
            parts: The tensors on the CPU, by node: those of the own node are sent, and those of others
                filled.
        """
        sent = [
            (part.view(torch.uint8), node * self.local_size + self.local_rank)
            for node, tensors in enumerate(parts)
            for part in tensors
        ]
        self._finish(
            "spread",
            torch.device("cpu"),
            lambda: [dist.broadcast(part, source, self._across, async_op=True) for part, source in sent],
        )

    def shared_memory(self, nbytes: int) -> int:
        """Return a descriptor of zeroed memory that every rank of the node gets; the caller closes it."""
        own = os.memfd_create("megatrain") if self.local_rank == 0 else -1
        if own >= 0:
            os.ftruncate(own, max(nbytes, 1))
        process, number = self.gather_values([os.getpid(), own])[self.node * self.local_size]
        file = own if own >= 0 else os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        self.meet()
        return file


def _passed(device: torch.device) -> Callable[[], bool]:
    """Return what tells whether a device has done what its current stream has been given so far."""
    event = torch.Event(device=device)
    event.record(torch.accelerator.current_stream(device))

    def is_passed() -> bool:
        with torch.accelerator.device_index(device.index):  # or the asking thread would open another device
            return bool(event.query())

    return is_passed


def _abandon_groups() -> None:
    """Let no group of this process be destroyed, not even at its end.

    A group of Gloo waits there for its threads, and they for ranks that may be lost: they do so for ever.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Ranks that share out the tokens of the same rows: they meet in every attention, in one order."""

    number: int
    index: int
    """Of this rank among them."""
    ranks: Ranks

    def swap(self, parts: Tensor) -> Tensor:
        """Give part n of a (number, ...) tensor to the n-th of them; return what all gave this one."""
        return self.ranks.swap(parts)
