"""The part of a block's state that each rank keeps: a pure function of sizes and numbers.

A block's state space is cut at multiples of `CUT_NUMEL` elements of each of its segments, bf16 and fp32. That
is what sums of squares add up at a time, so a norm of all chunks, in order, has the same bits whoever owns
them. A segment with fewer chunks than there are ranks stays whole on one of them, by the block's number.

An optimizer's planes may have a scale for every 256 elements of a parameter, of which a cut may be in the
middle. Then all of these belong to the share that has the first of them (`state_shares`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatrain.config.optimizers.optimizer import SCALE_NUMEL, Optimizer
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.host_buffers import PAGE_BYTES, padded
from megatrain.layout.totals import BlockTotals

PIECE_ALIGNMENT = 256
"""Bytes of which a piece of weights that ranks gather is a multiple."""

CUT_NUMEL = 1 << 15
"""Elements between cuts: 64 KiB of bf16, so that a page of a working plane has one owner."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a block's state that one rank keeps: a range of each segment, in indices of the state."""

    split: range
    """The range of bf16 parameters."""
    full: range
    """The range of fp32 parameters."""

    @property
    def numel(self) -> int:
        """Return the number of state elements of both ranges."""
        return len(self.split) + len(self.full)

    @property
    def ranges(self) -> tuple[range, ...]:
        """Return the ranges that hold something, of the two."""
        return tuple([part for part in (self.split, self.full) if part])

    @property
    def sizes(self) -> BlockBytes:
        """Return the bytes of the state in it: frozen weights and scales are not counted."""
        working = 2 * len(self.split) + 4 * len(self.full)
        return BlockBytes(working_bytes=working, num_split=len(self.split), num_state=self.numel)

    def place(self, index: int) -> int:
        """Return where an index of the state space is among those of the share, one after the other."""
        if index in self.split:
            return index - self.split.start
        return len(self.split) + index - self.full.start

    def gradient_pages(self, num_split: int) -> list[range]:
        """Return where the share lies in its block's gradient, in bytes, as whole pages.

        Args:
            num_split: The number of state elements of the block's bf16 parameters.
        """
        ends = [(2 * at.start, 2 * at.stop) for at in [self.split] if at]
        ends += [(4 * at.start - 2 * num_split, 4 * at.stop - 2 * num_split) for at in [self.full] if at]
        return [range(start // PAGE_BYTES * PAGE_BYTES, padded(stop)) for start, stop in ends]

    def cut(self, start: int, stop: int) -> list[range]:
        """Return what of the state range `[start, stop)` is in the share."""
        parts = []
        for part in (self.split, self.full):
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                parts.append(range(first, last))
        return parts

    def moved(self, edge: Callable[[int], int]) -> Share:
        """Return the share with its edges where a function moves them: up, by less than it is long."""
        split, full = (
            range(edge(part.start), edge(part.stop)) if part else part for part in (self.split, self.full)
        )
        return Share(split, full)

    def until(self, other: Share) -> Share:
        """Return the share, longer by what of it has been moved behind it."""
        return Share(range(self.split.start, other.split.stop), range(self.full.start, other.full.stop))


def shares(sizes: BlockBytes, block: int, num_ranks: int) -> list[Share]:
    """Cut a block's state among ranks.

    Args:
        sizes: The sizes of the block.
        block: The number of the block.
        num_ranks: The number of ranks among which the state is cut.

    Returns:
        One share per rank, in order. Together they are the whole state space, and no two have anything in
        common.
    """
    split = _cut(0, sizes.num_split, block, num_ranks)
    full = _cut(sizes.num_split, sizes.num_state, block, num_ranks)
    return [Share(*pair) for pair in zip(split, full, strict=True)]


def whole_share(sizes: BlockBytes) -> Share:
    """Return the share that is all of a block's state."""
    return Share(range(sizes.num_split), range(sizes.num_split, sizes.num_state))


def state_shares(
    cut: Sequence[Share], optimizer: Optimizer, scaled_edge: Callable[[int], int]
) -> list[Share]:
    """Return what of a block's state each rank keeps and updates.

    Args:
        cut: The share of the block's gradient that each rank adds up; see `shares`.
        optimizer: The optimizer whose state it is.
        scaled_edge: A function that returns where, from a state index on, a parameter or another scale
            begins.

    Raises:
        ConfigError: An update needs more than single elements.
    """
    optimizer.require_elements("several ranks cut")
    return [share.moved(scaled_edge) for share in cut] if optimizer.has_scales else [*cut]


def node_shares(cut: Sequence[Share], num_nodes: int) -> list[Share]:
    """Return what of a block's state the ranks of each node keep together, of which ranges adjoin."""
    size = len(cut) // num_nodes
    nodes = [cut[first : first + size] for first in range(0, len(cut), size)]
    return [Share(_joined([s.split for s in node]), _joined([s.full for s in node])) for node in nodes]


def node_totals(
    blocks: Iterable[BlockBytes], num_ranks: int, num_nodes: int, node: int = 0
) -> BlockTotals | None:
    """Return the sizes of what a node keeps of each block's state; None: there is one, with all of it.

    Scales are counted as evenly spread.
    """
    if num_nodes == 1:
        return None

    def kept(block: int, sizes: BlockBytes) -> BlockBytes:
        own = node_shares(shares(sizes, block, num_ranks), num_nodes)[node]
        return replace(own.sizes, num_scales=-(-sizes.num_scales * own.numel // max(1, sizes.num_state)))

    return BlockTotals(kept(block, sizes) for block, sizes in enumerate(blocks))


def drive_totals(blocks: Iterable[BlockBytes], num_ranks: int = 1, num_nodes: int = 1) -> BlockTotals:
    """Return the sizes of what a node has room for on its drives of each block: all weights, and its state.

    Of the state that is what the node with most of it keeps, so that all nodes move equally many pieces.
    """
    if num_nodes == 1:
        return BlockTotals(blocks)

    def room(block: int, sizes: BlockBytes) -> BlockBytes:
        kept = node_shares(shares(sizes, block, num_ranks), num_nodes)
        split = max(len(share.split) for share in kept)
        return replace(sizes, num_split=split, num_state=split + max(len(share.full) for share in kept))

    return BlockTotals(room(block, sizes) for block, sizes in enumerate(blocks))


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
    return _first_share(sizes, lambda numel: _planned(numel, num_ranks))


def room_of_share(sizes: BlockBytes, num_ranks: int) -> BlockBytes:
    """Return the sizes of the largest share of a block: on its device, every rank takes that room.

    A share may end behind its cut, by less than a scale has elements.
    """
    return sizes if num_ranks == 1 else largest_share(sizes, num_ranks, more=SCALE_NUMEL)


def largest_share(sizes: BlockBytes, num_ranks: int, *, more: int = 0) -> BlockBytes:
    """Return the sizes of the largest share of a block, each segment `more` elements longer if it can be."""
    return _first_share(sizes, lambda numel: min(numel, _largest(numel, num_ranks) + more)).sizes


def _first_share(sizes: BlockBytes, length: Callable[[int], int]) -> Share:
    """Return the share that has so much of the beginning of each segment."""
    split, full = length(sizes.num_split), length(sizes.num_state - sizes.num_split)
    return Share(range(split), range(sizes.num_split, sizes.num_split + full))


def num_chunks(numel: int) -> int:
    """Return how many sums of squares a segment of so many elements has."""
    return -(-numel // CUT_NUMEL)


def tree_room(count: int) -> int:
    """Return the power of two, at least 1, of numbers that a balanced tree adds up in place of so many."""
    return 1 << max(0, count - 1).bit_length()


def _planned(numel: int, num_ranks: int) -> int:
    return -(-numel // num_ranks) if num_chunks(numel) < num_ranks else _largest(numel, num_ranks)


def _largest(numel: int, num_ranks: int) -> int:
    count = num_chunks(numel)
    return numel if count < num_ranks else min(numel, CUT_NUMEL * -(-count // num_ranks))


def _cut(start: int, stop: int, block: int, num_ranks: int) -> list[range]:
    count = num_chunks(stop - start)
    if count < num_ranks:
        owner = block % num_ranks
        return [range(start, stop) if rank == owner else range(0) for rank in range(num_ranks)]
    edges = [start + CUT_NUMEL * (count * rank // num_ranks) for rank in range(num_ranks)] + [stop]
    return [range(*pair) for pair in pairwise(edges)]
