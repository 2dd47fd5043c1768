"""The processes that train together, one rank each, and what they say to each other.

Nothing here adds numbers up: the reductions of NCCL and Gloo have no order that is the same for every number
of ranks. Parts are exchanged, and whoever owns them adds them, in the order of `Runs`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.errors import ConfigError, RankError

_LANES = ("exchange", "norm", "spread", "caller", "orders")
"""What goes on at the same time has a group of its own: the calls of one group keep one order."""

_PATIENCE = timedelta(days=1)
"""How long ranks wait for the next order: the first one may evaluate or save meanwhile."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Says which machine this is."""


@contextmanager
def _answers() -> Iterator[None]:
    """Say in a sentence that another rank has ended, or does not answer.

    Raises:
        RankError: It has.
    """
    try:
        yield
    except RuntimeError as error:  # all that Gloo and NCCL have to say
        reason = str(error).strip().splitlines()[0]
        raise RankError(
            f"another rank has ended, or did not answer in time ({reason}); what it said is above. The same "
            "command goes on from the newest checkpoint"
        ) from error


class Ranks:
    """All ranks of a run; every method is called by each of them, in the same order for each lane."""

    def __init__(self, timeout: timedelta = timedelta(minutes=10)) -> None:
        """Join the processes of `torch.distributed`, which is initialised.

        Raises:
            ConfigError: They are no power of two, or on more than one node.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size.bit_count() != 1:
            raise ConfigError(f"{self.size} ranks train together; use a power of two: 1, 2, 4, 8, ...")
        self._groups = {
            lane: dist.new_group(timeout=_PATIENCE if lane == "orders" else timeout) for lane in _LANES
        }
        if len(set(self.gather_values(_BOOT.read_text()))) > 1:
            raise ConfigError("the ranks are on several nodes, and state is shared within one; use one node")

    def exchange(self, mine: Tensor, counts: Sequence[int]) -> Tensor:
        """Send each rank its part of a flat tensor, and return the parts that all have sent to this one.

        Args:
            mine: (sum(counts),) of any dtype.
            counts: Elements for each rank.

        Returns:
            (size, counts[rank]) parts, in the order of ranks.
        """
        own = counts[self.rank]
        parts = torch.empty(self.size * own, dtype=mine.dtype, device=mine.device)
        group = self._groups["exchange"]
        with _answers():
            dist.all_to_all_single(parts, mine, [own] * self.size, list(counts), group=group)
        return parts.view(self.size, own)

    def gather(self, mine: Tensor, lane: str = "caller") -> list[Tensor]:
        """Return everybody's tensor, in the order of ranks; they are equally long."""
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with _answers():
            dist.all_gather(found, mine, group=self._groups[lane])
        return found

    def gather_values(self, mine: Any, lane: str = "caller") -> list[Any]:
        """Return everybody's plain JSON value, in the order of ranks."""
        text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self.gather(torch.tensor([text.numel()]), lane)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: text.numel()] = text
        found = zip(self.gather(padded, lane), sizes, strict=True)
        return [json.loads(each[:size].numpy().tobytes()) for each, size in found]

    def tell(self, value: Any = None) -> Any:
        """Return the first rank's plain JSON value; what the others give is not looked at."""
        return self.gather_values(value if self.rank == 0 else None, "orders")[0]

    def meet(self, lane: str = "caller") -> None:
        """Wait until every rank has come here."""
        with _answers():
            dist.barrier(group=self._groups[lane])

    def shared_memory(self, nbytes: int) -> int:
        """Return a descriptor of zeroed memory that every rank of the node gets; the caller closes it."""
        own = os.memfd_create("megatrain") if self.rank == 0 else -1
        if own >= 0:
            os.ftruncate(own, max(nbytes, 1))
        process, number = self.tell([os.getpid(), own])
        file = own if own >= 0 else os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        self.meet()
        return file
