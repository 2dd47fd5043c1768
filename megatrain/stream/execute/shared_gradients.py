"""A rank's share of every gradient: exchanged between ranks, added up by its owner, its squares, its weights.

Every rank sends each other one its part of the rank's own fp32 sum. The owner adds the parts by a balanced
tree in the order of ranks, which is the upper part of the tree of `Runs`: so the sum has the same bits for
every number of ranks. Where ranks share out rows, the tree is over the runs of each shard first and over the
shards then, so that it has these bits for every number of ranks that have the same shards. Norms are made of
one sum of squares per chunk of `CUT_NUMEL` elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.layout.blocks import BlockLayout
from megatrain.layout.ownership import CUT_NUMEL, Share, shares
from megatrain.model.sequence.shards import Shards
from megatrain.optim.pool import default_pool
from megatrain.optim.sums import squares_of_chunks
from megatrain.store.state import HostState


class Ranks(Protocol):
    """What is needed of the ranks that train together: every method is called by all, in one order."""

    rank: int
    size: int
    num_nodes: int
    node: int
    local_rank: int
    """Place among those of its node."""

    def exchange(self, mine: Tensor, counts: Sequence[int]) -> Tensor:
        """Send `counts[r]` elements of a flat tensor to rank r; return (size, own count) parts of all."""

    def gather(self, mine: Tensor, lane: str = "caller") -> list[Tensor]:
        """Return everybody's tensor; they are equally long."""

    def gather_values(self, mine: Any) -> list[Any]:
        """Return everybody's plain JSON value."""

    def neighbours(self, number: int) -> Shards:
        """Return this rank and those beside it that share out rows."""

    def meet(self, lane: str = "caller") -> None:
        """Wait until every rank, or, in lane `spread`, every rank of the node, has come here."""

    def spread(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Bring parts, given by node, from each node to the others."""

    def shared_memory(self, nbytes: int) -> int:
        """Return a descriptor of memory that every rank of the node maps."""


class SharedGradients:
    """What one rank adds up, and keeps, of a step's gradients."""

    def __init__(self, ranks: Ranks, layouts: Sequence[BlockLayout], sequence: int = 1) -> None:
        """Cut every block's state among the ranks, of which each `sequence` neighbours share out rows."""
        self.ranks = ranks
        self._order = [rank for shard in range(sequence) for rank in range(shard, ranks.size, sequence)]
        """Of ranks, as their sums are the leaves of a tree."""
        self._layouts = layouts
        self._cuts = [shares(layout.sizes, n, ranks.size) for n, layout in enumerate(layouts)]
        self.shares: list[Share] = [cut[ranks.rank] for cut in self._cuts]
        """This rank's, by block."""
        counts = [sum(_num_chunks(layout)) for layout in layouts]
        self._squares = torch.zeros(sum(counts), dtype=torch.float64)
        self._starts = [0, *accumulate(counts)]

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
            kept.copy_(sums[own.start : own.stop])
            squares = squares_of_chunks(default_pool(), kept)
            chunk += (own.start - start) // CUT_NUMEL
            self._squares[chunk : chunk + len(squares)] = torch.from_numpy(squares)

    def spread(self, block: int, working: Tensor) -> None:
        """Make the working weights of a block new on this node, once all of its ranks have come here.

        Each rank sends its share to those in its place on the other nodes, and fills in theirs.

        Args:
            block: Its number.
            working: Its working bytes, of which this rank has updated its share.
        """
        ranks, layout = self.ranks, self._layouts[block]
        if ranks.num_nodes > 1:
            peers = self._cuts[block][ranks.local_rank :: ranks.size // ranks.num_nodes]
            ranks.spread([[working[layout.working_range(part)] for part in s.ranges] for s in peers])
        ranks.meet("spread")

    def show_gradients(self, host: HostState) -> None:
        """Make all ranks' complete gradients readable; every rank's are at home."""
        self.ranks.meet()
        host.bring_gradients()

    def round(self, block: int, sums: Tensor) -> None:
        """Round this rank's share of a complete sum to the working dtype where it is; else as `keep`."""
        edge = self._layouts[block].num_split
        low = torch.empty(edge, dtype=torch.bfloat16)
        self.keep(block, sums, (low, sums[edge:]))
        own = self.shares[block].split
        sums[own.start : own.stop].copy_(low[own.start : own.stop])

    def sums(self, blocks: Sequence[int]) -> list[float]:
        """Return the sums of squares of complete gradients, all ranks' shares together."""
        found = torch.stack(self.ranks.gather(self._squares, "norm")).sum(dim=0)  # one is not zero
        return [self._sum_of(block, found) for block in blocks]

    def clear(self) -> None:
        """Forget the step's squares."""
        self._squares.zero_()

    def _sum_of(self, block: int, squares: Tensor) -> float:
        own = squares[self._starts[block] : self._starts[block + 1]].tolist()
        edge = _num_chunks(self._layouts[block])[0]
        return math.fsum(own[:edge]) + math.fsum(own[edge:])


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
