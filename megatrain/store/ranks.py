"""What state needs of the ranks of a node that keep it together."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class StateRanks(Protocol):
    """Every method is called by all ranks, in one order for each lane."""

    rank: int
    size: int

    def gather(self, mine: Tensor, lane: str = "caller") -> list[Tensor]:
        """Return everybody's tensor; they are equally long."""

    def meet(self, lane: str = "caller") -> None:
        """Wait until every rank has come here."""

    def shared_memory(self, nbytes: int) -> int:
        """Return a descriptor of zeroed memory that every rank maps."""
