"""What state needs of the ranks that keep it: those of a node together, and each node its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class StateRanks(Protocol):
    """Every method is called by all ranks, in one order for each lane."""

    rank: int
    size: int
    num_nodes: int
    node: int
    local_size: int
    """The number of ranks of a node."""
    local_rank: int
    """This rank's place among them."""

    def gather(self, mine: Tensor, lane: str = "caller") -> list[Tensor]:
        """Return everybody's tensor; they are equally long."""

    def meet(self, lane: str = "caller") -> None:
        """Wait until every rank, or, in lane `spread`, every rank of the node, has come here."""

    def spread(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Bring parts, given by node, from each node to the others."""

    def shared_memory(self, nbytes: int) -> int | None:
        """Return a descriptor of zeroed memory that every rank of the node maps; None: there is one rank."""


def on_each(ranks: StateRanks, flag: bool) -> list[bool]:
    """Return of each rank whether something is so there; all call it, in lane `caller`."""
    return [bool(found) for found in ranks.gather(torch.tensor(int(flag)))]
