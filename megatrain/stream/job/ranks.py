"""What an engine needs of the ranks that train together; `Alone` is the one of a process by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from megatrain.model.sequence.shards import Shards
from megatrain.store.ranks import StateRanks


class Ranks(StateRanks, Protocol):
    """The ranks, which keep one state: every method is called by all of them, in one order."""

    gathers: bool
    """Each fetches a piece of every block's weights, and those of a node gather them."""

    @property
    def have_given_up(self) -> bool:
        """Whether a rank is known to have given up the step that is going on."""

    def begin_step(self) -> None:
        """Take note that a step begins, which a rank may give up."""

    def end_step(self) -> None:
        """Take note that it is over for this rank."""

    def give_up(self) -> None:
        """Let the others know at once that this rank gives up the step; no other rank need call it."""

    def exchange(self, mine: Tensor, counts: Sequence[int], lane: str, parts: Tensor) -> Tensor:
        """Send `counts[n]` elements to the n-th of a lane's group; return (group, own count) parts of all."""

    def gather_values(self, mine: Any) -> list[Any]:
        """Return everybody's plain JSON value."""

    def neighbours(self, number: int) -> Shards:
        """Return this rank and those beside it that share out rows."""

    def gather_pieces(self, whole: Tensor) -> None:
        """Make a flat tensor whole, of whose equal pieces each rank of the node has brought its own."""

    def gather_shares(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Bring parts on the device, given by rank, from each rank to all others."""
