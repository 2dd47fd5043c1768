"""Which rank keeps which part of a block's state: a pure function of sizes and numbers.

A block's state space is cut at multiples of `CUT_NUMEL` elements of each of its segments, bf16 and fp32. That
is what sums of squares add up at a time, so a norm of all chunks, in order, has the same bits whoever owns
them. A segment with fewer chunks than there are ranks stays whole on one of them, by the block's number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.host_buffers import PAGE_BYTES, padded
from megatrain.layout.totals import BlockTotals

PIECE_ALIGNMENT = 256
"""Bytes of which a piece of weights that ranks gather is a multiple."""

CUT_NUMEL = 1 << 15
"""Elements between cuts: 64 KiB of bf16, so that a page of a working plane has one owner."""


@dataclass(frozen=True, slots=True)
class Share:
    """What of a block's state one rank keeps: a range of each segment, as indices of the state space."""

    split: range
    """Of bf16 parameters."""
    full: range
    """Of fp32 parameters."""

    @property
    def numel(self) -> int:
        """State elements of both."""
        return len(self.split) + len(self.full)

    @property
    def ranges(self) -> tuple[range, ...]:
        """Those of the two that hold something."""
        return tuple(part for part in (self.split, self.full) if part)

    @property
    def sizes(self) -> BlockBytes:
        """The bytes of the state in it: frozen weights and scales are not counted."""
        working = 2 * len(self.split) + 4 * len(self.full)
        return BlockBytes(working_bytes=working, num_split=len(self.split), num_state=self.numel)

    def gradient_pages(self, num_split: int) -> list[range]:
        """Return where the share lies in its block's gradient, in bytes, as whole pages.

        Args:
            num_split: State elements of the block's bf16 parameters.
        """
        ends = [(2 * at.start, 2 * at.stop) for at in [self.split] if at]
        ends += [(4 * at.start - 2 * num_split, 4 * at.stop - 2 * num_split) for at in [self.full] if at]
        return [range(start // PAGE_BYTES * PAGE_BYTES, padded(stop)) for start, stop in ends]

    def cut(self, start: int, stop: int, unit: int = 1) -> list[range]:
        """Return what of the state range `[start, stop)` is in the share.

        Args:
            start: Of the range.
            stop: Behind it.
            unit: So many elements, counted from `start`, belong to the share that has the first of them.
        """

        def up(edge: int) -> int:
            return min(stop, start + -(-(max(start, edge) - start) // unit) * unit)

        parts = (range(up(part.start), up(part.stop)) for part in self.ranges)
        return [part for part in parts if part]


def shares(sizes: BlockBytes, block: int, num_ranks: int) -> list[Share]:
    """Cut a block's state among ranks.

    Args:
        sizes: Of the block.
        block: Its number.
        num_ranks: Among how many.

    Returns:
        One share per rank, in order. Together they are the whole state space, and no two have anything in
        common.
    """
    split = _cut(0, sizes.num_split, block, num_ranks)
    full = _cut(sizes.num_split, sizes.num_state, block, num_ranks)
    return [Share(*pair) for pair in zip(split, full, strict=True)]


def node_shares(sizes: BlockBytes, block: int, num_ranks: int, num_nodes: int) -> list[Share]:
    """Return what of a block's state the ranks of each node keep together, of which ranges adjoin."""
    cut, size = shares(sizes, block, num_ranks), num_ranks // num_nodes
    nodes = [cut[first : first + size] for first in range(0, num_ranks, size)]
    return [Share(_joined([s.split for s in node]), _joined([s.full for s in node])) for node in nodes]


def node_totals(
    blocks: Iterable[BlockBytes], num_ranks: int, num_nodes: int, node: int = 0
) -> BlockTotals | None:
    """Return the sizes of what a node keeps of each block's state; None: there is one, with all of it."""
    if num_nodes == 1:
        return None
    return BlockTotals(
        node_shares(sizes, block, num_ranks, num_nodes)[node].sizes for block, sizes in enumerate(blocks)
    )


def _joined(parts: list[range]) -> range:
    held = [part for part in parts if part]
    return range(held[0].start, held[-1].stop) if held else range(0)


def piece_bytes(nbytes: int, num_ranks: int) -> int:
    """Return the bytes of the equal pieces of a block's weights that ranks fetch one each, and gather.

    They have nothing to do with shares: the ranks of a node have all weights in one memory. What is left over
    behind the last one, less than `PIECE_ALIGNMENT` per rank, each fetches for itself.
    """
    return nbytes // (num_ranks * PIECE_ALIGNMENT) * PIECE_ALIGNMENT


def planned_share(sizes: BlockBytes, num_ranks: int) -> Share:
    """Return what a plan counts as a rank's share of a block: the largest there is.

    Of a segment that stays whole on one of many ranks it is the mean: they take such segments in turn.
    """
    split, full = (
        _planned(numel, num_ranks) for numel in (sizes.num_split, sizes.num_state - sizes.num_split)
    )
    return Share(range(split), range(sizes.num_split, sizes.num_split + full))


def _planned(numel: int, num_ranks: int) -> int:
    num_chunks = -(-numel // CUT_NUMEL)
    if num_chunks < num_ranks:
        return -(-numel // num_ranks)
    return min(numel, CUT_NUMEL * -(-num_chunks // num_ranks))


def _cut(start: int, stop: int, block: int, num_ranks: int) -> list[range]:
    num_chunks = -(-(stop - start) // CUT_NUMEL)
    if num_chunks < num_ranks:
        owner = block % num_ranks
        return [range(start, stop) if rank == owner else range(0) for rank in range(num_ranks)]
    edges = [start + CUT_NUMEL * (num_chunks * rank // num_ranks) for rank in range(num_ranks)] + [stop]
    return [range(*pair) for pair in pairwise(edges)]
