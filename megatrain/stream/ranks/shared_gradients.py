"""A rank's share of every gradient: exchanged between ranks, added up by its owner, its squares, its weights.

Every rank sends each other one its part of the rank's own fp32 sum. The owner adds the parts by a balanced
tree in the order of ranks, which is the upper part of the tree of `Runs`: so the sum has the same bits for
every number of ranks. Where ranks share out rows, the tree is over the runs of each shard first and over the
shards then, so that it has these bits for every number of ranks that have the same shards. Norms are made of
one sum of squares per chunk of `CUT_NUMEL` elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.layout.blocks import BlockLayout
from megatrain.layout.ownership import CUT_NUMEL, Share, piece_bytes, shares
from megatrain.model.sequence.shards import Shards
from megatrain.store.state import HostState
from megatrain.stream.lanes import Lanes


class Ranks(Protocol):
    """What is needed of the ranks that train together: every method is called by all, in one order."""

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

    def exchange(self, mine: Tensor, counts: Sequence[int]) -> Tensor:
        """Send `counts[r]` elements of a flat tensor to rank r; return (size, own count) parts of all."""

    def gather(self, mine: Tensor, lane: str = "caller") -> list[Tensor]:
        """Return everybody's tensor; they are equally long."""

    def gather_values(self, mine: Any) -> list[Any]:
        """Return everybody's plain JSON value."""

    def neighbours(self, number: int) -> Shards:
        """Return this rank and those beside it that share out rows."""

    def gather_pieces(self, whole: Tensor) -> None:
        """Make a flat tensor whole, of whose equal pieces each rank of the node has brought its own."""

    def meet(self, lane: str = "caller") -> None:
        """Wait until every rank, or, in lane `spread`, every rank of the node, has come here."""

    def spread(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Bring parts, given by node, from each node to the others."""

    def shared_memory(self, nbytes: int) -> int:
        """Return a descriptor of memory that every rank of the node maps."""


class SharedGradients:
    """What one rank fetches of weights, and adds up, and keeps, of a step's gradients."""

    def __init__(self, ranks: Ranks, layouts: Sequence[BlockLayout], lanes: Lanes, sequence: int = 1) -> None:
        """Cut every block's state among the ranks, of which each `sequence` neighbours share out rows."""
        self.ranks = ranks
        self._lanes = lanes
        self._order = [rank for shard in range(sequence) for rank in range(shard, ranks.size, sequence)]
        """Of ranks, as their sums are the leaves of a tree."""
        self._layouts = layouts
        self._cuts = [shares(layout.sizes, n, ranks.size) for n, layout in enumerate(layouts)]
        self.shares: list[Share] = [cut[ranks.rank] for cut in self._cuts]
        """This rank's, by block."""
        counts = [sum(_num_chunks(layout)) for layout in layouts]
        self._squares = torch.zeros(sum(counts), dtype=torch.float64, device=lanes.device)
        """Of every chunk; those of other ranks' shares are zeros."""
        self._starts = [0, *accumulate(counts)]

    @property
    def gathers_among(self) -> int:
        """How many ranks gather what each has fetched a piece of; 1: none does."""
        return self.ranks.local_size if self.ranks.gathers else 1

    def pieces(self, nbytes: int) -> list[slice]:
        """Return what this rank fetches of a block's weights: its piece, and what is left over by all."""
        size, place = self.ranks.local_size, self.ranks.local_rank
        piece = piece_bytes(nbytes, size)
        parts = slice(place * piece, (place + 1) * piece), slice(size * piece, nbytes)
        return [part for part in parts if part.start < part.stop]

    def gather(self, place: Tensor) -> None:
        """Make a block's weights whole, of which every rank of the node has fetched its piece."""
        size = self.ranks.local_size
        self.ranks.gather_pieces(place[: size * piece_bytes(place.numel(), size)])

    def exchange(self, block: int, sums: Tensor, present: set[str]) -> None:
        """Make a block's sum that of all ranks, in this rank's share of it; what else is there is old then.

        Args:
            block: Its number.
            sums: (num_state,) fp32, this rank's sum.
            present: Names of parameters that have a gradient; those of the other ranks are added.
        """
        layout, cut = self._layouts[block], self._cuts[block]
        edge, rank = layout.num_split, self.ranks.rank
        for part, ranges in (
            (sums[:edge], [share.split for share in cut]),
            (sums[edge:], [share.full for share in cut]),
        ):
            if not part.numel():
                continue
            parts = self.ranks.exchange(part, [len(own) for own in ranges])
            own = ranges[rank]
            if own:
                sums[own.start : own.stop].copy_(_tree(parts, self._order))
        flags = torch.tensor([entry.name in present for entry in layout.trained], dtype=torch.uint8)
        found = torch.stack(self.ranks.gather(flags, "exchange")).any(dim=0).tolist()
        present |= {entry.name for entry, is_there in zip(layout.trained, found, strict=True) if is_there}

    def keep(self, block: int, sums: Tensor, plane: tuple[Tensor, Tensor]) -> None:
        """Round this rank's share of a complete sum into the gradient plane, and sum its squares.

        Args:
            block: Its number.
            sums: (num_state,) fp32, as `exchange` leaves it.
            plane: The block's gradient, its bf16 and its fp32 part.
        """
        share, layout = self.shares[block], self._layouts[block]
        edge = layout.num_split
        first = self._starts[block]
        for own, target, start, chunk in (
            (share.split, plane[0], 0, first),
            (share.full, plane[1], edge, first + _num_chunks(layout)[0]),
        ):
            if not own:
                continue
            kept = target[own.start - start : own.stop - start]
            rounded = sums[own.start : own.stop].to(kept.dtype)
            self._lanes.copy(kept, rounded)
            squares = self._lanes.squares_of_chunks(rounded)
            chunk += (own.start - start) // CUT_NUMEL
            self._squares[chunk : chunk + len(squares)].copy_(squares)

    def spread(self, block: int, working: Tensor) -> None:
        """Make the working weights of a block new on this node, once all of its ranks have come here.

        Each rank sends its share to those in its place on the other nodes, and fills in theirs.

        Args:
            block: Its number.
            working: Its working bytes, of which this rank has updated its share.
        """
        ranks, layout = self.ranks, self._layouts[block]
        if ranks.num_nodes > 1:
            peers = self._cuts[block][ranks.local_rank :: ranks.local_size]
            ranks.spread([[working[layout.working_range(part)] for part in s.ranges] for s in peers])
        ranks.meet("spread")

    def show_gradients(self, host: HostState) -> None:
        """Make all ranks' complete gradients readable; every rank's are at home."""
        self.ranks.meet()
        host.bring_gradients()

    def round(self, block: int, sums: Tensor) -> None:
        """Round this rank's share of a complete sum to the working dtype where it is; else as `keep`."""
        edge = self._layouts[block].num_split
        low = torch.empty(edge, dtype=torch.bfloat16, device=sums.device)
        self.keep(block, sums, (low, sums[edge:]))
        own = self.shares[block].split
        sums[own.start : own.stop].copy_(low[own.start : own.stop])

    def sums(self, blocks: Sequence[int]) -> list[float]:
        """Return the sums of squares of complete gradients, all ranks' shares together."""
        found = torch.stack(self.ranks.gather(self._squares.cpu(), "norm")).sum(dim=0)  # one is not zero
        return [self._sum_of(block, found) for block in blocks]

    def _sum_of(self, block: int, squares: Tensor) -> float:
        own = squares[self._starts[block] : self._starts[block + 1]]
        edge = _num_chunks(self._layouts[block])[0]
        return self._lanes.sum_of_chunks(own[:edge]) + self._lanes.sum_of_chunks(own[edge:])


def _num_chunks(layout: BlockLayout) -> tuple[int, int]:
    """Return how many sums of squares the two segments of a block have."""
    split, full = layout.num_split, layout.num_state - layout.num_split
    return -(-split // CUT_NUMEL), -(-full // CUT_NUMEL)


def _tree(parts: Tensor, order: Sequence[int]) -> Tensor:
    """Add up the rows of a (2^n, m) tensor by a balanced tree in some order, in place; return the sum."""
    step = 1
    while step < len(order):
        for place in range(0, len(order), 2 * step):
            parts[order[place]].add_(parts[order[place + step]])
        step *= 2
    return parts[order[0]]
