"""What an engine needs of the ranks that train together; `Alone` is the one of a process by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from megatrain.model.sequence.shards import Shards


class Ranks(Protocol):
    """The ranks: every method is called by all of them, in one order."""

    rank: int
    size: int
    num_nodes: int
    node: int
    local_size: int
    """Ranks of a node."""
    local_rank: int
    """Place among them."""
    gathers: bool
    """Each fetches a piece of every block's weights, and those of a node gather them."""

    def exchange(self, mine: Tensor, counts: Sequence[int], lane: str, parts: Tensor) -> Tensor:
        """Send `counts[n]` elements to the n-th of a lane's group; return (group, own count) parts of all."""

    def gather(self, mine: Tensor, lane: str = "caller") -> list[Tensor]:
        """Return everybody's tensor; they are equally long."""

    def gather_values(self, mine: Any) -> list[Any]:
        """Return everybody's plain JSON value."""

    def neighbours(self, number: int) -> Shards:
        """Return this rank and those beside it that share out rows."""

    def gather_pieces(self, whole: Tensor) -> None:
        """Make a flat tensor whole, of whose equal pieces each rank of the node has brought its own."""

    def gather_shares(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Bring parts on the device, given by rank, from each rank to all others."""

    def meet(self, lane: str = "caller") -> None:
        """Wait until every rank, or, in lane `spread`, every rank of the node, has come here."""

    def spread(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Bring parts, given by node, from each node to the others."""

    def shared_memory(self, nbytes: int) -> int | None:
        """Return a descriptor of memory that every rank of the node maps; None: there is one rank."""
