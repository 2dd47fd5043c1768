"""A rank's share of every gradient: exchanged between ranks, added up by its owner, its squares, its weights.

Every rank's own fp32 sum goes to the owners of its parts (`owned_sums`), who add by a balanced tree in the
order of ranks, which is an upper part of the tree of `Runs`: so the sum has the same bits for every number of
ranks. It may be the sum of a round, which joins those of earlier ones (`StepSums`). Where ranks share out
rows, the tree is over the runs of each shard first and over the shards at last, so that it has these bits for
every number of ranks that have the same shards. Norms are made of one sum of squares per chunk of `CUT_NUMEL`
elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.hardware.memory import GIB, give_back_where_short
from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.exchange import Exchange, rail_numel
from megatrain.layout.ownership import CUT_NUMEL, num_chunks, piece_bytes, shares, state_shares
from megatrain.layout.pools import SQUARES_CHUNK_NUMEL
from megatrain.plan.program.block_size import BlockSize
from megatrain.store.state import HostState
from megatrain.stream.job.ranks import Ranks
from megatrain.stream.lanes import Lanes
from megatrain.stream.ranks.own_gradients import OwnGradients
from megatrain.stream.ranks.sums import Room, owned_sums, tree

_SHORT_BYTES, _SHORT_SUMS = GIB, 8
"""Memory is short on a CPU where less than this is left, or less than so many sums of a block."""


class SharedGradients(OwnGradients):
    """What one rank fetches of weights, and adds up, and keeps, of a step's gradients."""

    def __init__(
        self,
        ranks: Ranks,
        layouts: Sequence[BlockLayout],
        lanes: Lanes,
        sequence: int = 1,
        optimizer: Optimizer = DEFAULT,
    ) -> None:
        """Cut every block's state among the ranks, of which each `sequence` neighbours share out rows."""
        super().__init__(ranks, layouts, lanes, optimizer)
        self.sequence = sequence
        self._exchange = Exchange(ranks.size, ranks.num_nodes, sequence)
        self._cuts = [shares(layout.sizes, n, ranks.size) for n, layout in enumerate(layouts)]
        self._updated = [
            state_shares(cut, optimizer, layout.scaled_edge)
            for cut, layout in zip(self._cuts, layouts, strict=True)
        ]
        """By block, what of its state each rank updates: all elements of a scale."""
        self._kept = [
            [cut.until(updated) for cut, updated in zip(*both, strict=True)]
            for both in zip(self._cuts, self._updated, strict=True)
        ]
        """What of its gradient each rank keeps: what it adds up, and what it updates of the next rank's."""
        self.shares = [kept[ranks.rank] for kept in self._kept]
        self.updated = [updated[ranks.rank] for updated in self._updated]
        counts = [sum(_num_chunks(layout)) for layout in layouts]
        self._chunk_squares = torch.zeros(sum(counts), dtype=torch.float64, device=lanes.device)
        """Of every chunk; those of other ranks' shares are zeros."""
        self._starts = [0, *accumulate(counts)]
        sizes = [layout.sizes for layout in layouts]
        self._room = Room()
        if lanes.device.type != "cpu":
            nbytes = pools.exchange_room(sizes, self._exchange)
            self._room = Room(torch.empty(nbytes, dtype=torch.uint8, device=lanes.device))

    def block_size(self, block: int, *, is_streamed: bool, on_device: bool) -> BlockSize:
        """Return what a program needs to know of a block, of which this rank keeps a share."""
        others = (self.ranks.size if on_device else self.ranks.num_nodes) - 1
        size = BlockSize.of(
            self._layouts[block].sizes,
            is_streamed=is_streamed,
            on_device=on_device,
            optimizer=self._optimizer,
            share=self.shares[block],
            gathers_among=self.ranks.local_size if self.ranks.gathers else 1,
            sequence=self.sequence,
        )
        spread_bytes = others * self.updated[block].sizes.working_bytes
        return replace(size, exchange_bytes=self._exchange_bytes(block), spread_bytes=spread_bytes)

    def with_optimizer(self, block: int, size: BlockSize, optimizer: Optimizer) -> BlockSize:
        """Return the size of a block with another optimizer."""
        return size.with_optimizer(self._layouts[block].sizes, optimizer, self.updated[block])

    def _exchange_bytes(self, block: int) -> int:
        """Return the bytes that this rank sends of a block's sum."""
        own = [share.numel for share in self._cuts[block]]
        more = [kept.numel - numel for kept, numel in zip(self._kept[block], own, strict=True)]
        rank, size = self.ranks.rank, self.ranks.local_size
        return sum(
            self._exchange.sent_bytes(sum(counts), rail_numel(counts, rank, size), counts[rank])
            for counts in (own, more)
        )

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

    def gather_shares(self, block: int, working: Tensor) -> None:
        """Make a resident block's working weights new on this device, of which every rank has a share.

        Args:
            block: The number of the block.
            working: The block's working bytes on the device, of which this rank has updated its share.
        """
        layout = self._layouts[block]
        self.ranks.gather_shares(
            [[working[layout.working_range(part)] for part in share.ranges] for share in self._updated[block]]
        )

    def exchange(
        self, block: int, sums: Tensor, shares: Tensor, present: set[str], *, joined: range, completes: bool
    ) -> None:
        """Make a block's sum that of all ranks, in this rank's share of it, and join those of earlier rounds.

        Args:
            block: The block's number.
            sums: (num_state,) fp32, this rank's sum. If the gradient is complete, this rank's share of it
                comes there; what else is there is old then.
            shares: (sums, shards of rows, numel) fp32: this rank's shares of partial sums, by their places in
                the stack. What is not complete comes there.
            present: Names of parameters that have a gradient; those of the other ranks are added.
            joined: The places in the stack of what joins the sum, which takes the place of the first.
            completes: The gradient is complete then.
        """
        layout, cut = self._layouts[block], self._cuts[block]
        edge, rank = layout.num_split, self.ranks.rank
        kept = self._kept[block]
        start = len(kept[rank].split)
        if sums.device.type == "cpu":
            # What the backward has freed stays glibc's, beside what the exchange takes: each of two ranks
            # took 69 to 90 MB more than the 836 MB that were planned.
            give_back_where_short(max(_SHORT_BYTES, _SHORT_SUMS * sums.nbytes))
        for whole, ranges, longer, column in (
            (sums[:edge], [share.split for share in cut], [share.split for share in kept], 0),
            (sums[edge:], [share.full for share in cut], [share.full for share in kept], start),
        ):
            if not whole.numel():
                continue
            behind = [range(own.stop, long.stop) for own, long in zip(ranges, longer, strict=True)]
            with self._room.piece():
                rest = self._room.take(sums, sum(map(len, behind)))
                torch.cat(
                    [sums[each.start : each.stop] for each in behind], out=rest
                )  # before any is complete
                for mine, owned, first in ((whole, ranges, 0), (rest, behind, len(ranges[rank]))):
                    places = longer[rank].start + first, column + first
                    take = partial(_take, sums, shares, places, joined, completes)
                    owned_sums(self.ranks, self._exchange, mine, [*map(len, owned)], take, self._room)
        flags = torch.tensor([entry.name in present for entry in layout.trained], dtype=torch.uint8)
        flagged = torch.stack(self.ranks.gather(flags, "exchange")).any(dim=0).tolist()
        present |= {entry.name for entry, is_there in zip(layout.trained, flagged, strict=True) if is_there}

    def keep(self, block: int, sums: Tensor, kept: Sequence[Tensor]) -> None:
        """Round this rank's share of a complete sum to where it is kept, and sum its squares.

        Args:
            block: The number of the block.
            sums: (num_state,) fp32, as `exchange` leaves it.
            kept: The places for the share's bf16 and its fp32 part, each as long as its range.
        """
        cut, share, layout = self._cuts[block][self.ranks.rank], self.shares[block], self._layouts[block]
        first = self._starts[block]
        behind = first + _num_chunks(layout)[0]
        for own, long, target, rounds, start, chunk in (
            (cut.split, share.split, kept[0], True, 0, first),
            (cut.full, share.full, kept[1], False, layout.num_split, behind),
        ):
            if not own:
                continue
            for at in range(0, len(long), SQUARES_CHUNK_NUMEL):
                part = long[at : at + SQUARES_CHUNK_NUMEL]
                rounded = sums[part.start : part.stop]
                if rounds:
                    rounded = self._low[: len(part)].copy_(rounded)
                self._lanes.copy(target[at : at + len(part)], rounded)
                squared = rounded[: max(0, len(own) - at)]
                place = chunk + (own.start - start + at) // CUT_NUMEL
                out = self._chunk_squares[place : place + num_chunks(len(squared))]
                self._lanes.squares_of_chunks(squared, out, self._wide)

    def hold(self, block: int, sums: Tensor, kept: Sequence[Tensor]) -> None:
        """Do as `keep`, which leaves little on the device at a time."""
        self.keep(block, sums, kept)

    def spread(self, block: int, working: Tensor) -> None:
        """Make the working weights of a block new on this node, once all of its ranks have come here.

        Each rank sends its share to those in its place on the other nodes, and fills in theirs.

        Args:
            block: The number of the block.
            working: The block's working bytes, of which this rank has updated its share.
        """
        ranks, layout = self.ranks, self._layouts[block]
        if ranks.num_nodes > 1:
            peers = self._updated[block][ranks.local_rank :: ranks.local_size]
            ranks.spread([[working[layout.working_range(part)] for part in s.ranges] for s in peers])
        ranks.meet("spread")

    def show_gradients(self, host: HostState) -> None:
        """Make all ranks' complete gradients readable; every rank's are at home."""
        self.ranks.meet()
        host.bring_gradients()

    def round(self, block: int, sums: Tensor) -> None:
        """Round this rank's share of a complete sum to the working dtype where it is; else as `keep`."""
        share = self.shares[block]
        parts = [sums[part.start : part.stop] for part in (share.split, share.full)]
        self.keep(block, sums, parts)

    def sums(self, blocks: Sequence[int]) -> list[float]:
        """Return the sums of squares of complete gradients, all ranks' shares together."""
        found = torch.stack(self.ranks.gather(self._chunk_squares.cpu(), "norm"))
        found = found.sum(dim=0)  # one is not zero
        return [self._sum_of(block, found) for block in blocks]

    def _sum_of(self, block: int, squares: Tensor) -> float:
        own = squares[self._starts[block] : self._starts[block + 1]]
        edge = _num_chunks(self._layouts[block])[0]
        return self._lanes.sum_of_chunks(own[:edge]) + self._lanes.sum_of_chunks(own[edge:])


def _take(
    sums: Tensor,
    shares: Tensor,
    places: tuple[int, int],
    joined: range,
    completes: bool,
    start: int,
    found: list[Tensor],
) -> None:
    """Join a piece of a share with the sums of earlier rounds, and put it where it belongs.

    Args:
        sums: The sums of earlier rounds, as in `exchange`.
        shares: The memory of complete shares, as in `exchange`.
        places: The places where the share begins in a sum, and in `shares`.
        joined: The places, in the stack of sums, of what joins them.
        completes: A claim that the gradient is complete then.
        start: The start of the piece, in the share.
        found: The sums of the piece, one of each shard of rows.
    """
    first, column = (place + start for place in places)
    columns = slice(column, column + len(found[0]))
    for shard, total in enumerate(found):
        for place in reversed(joined):
            total.add_(shares[place, shard, columns])
        if not completes:
            shares[joined.start, shard, columns].copy_(total)
    if completes:
        sums[first : first + len(found[0])].copy_(tree(found))


def _num_chunks(layout: BlockLayout) -> tuple[int, int]:
    """Return how many sums of squares the two segments of a block have."""
    split, full = layout.num_split, layout.num_state - layout.num_split
    return num_chunks(split), num_chunks(full)


def gradients_of(
    ranks: Ranks, layouts: Sequence[BlockLayout], lanes: Lanes, sequence: int, optimizer: Optimizer
) -> OwnGradients:
    """Return what a rank adds up, keeps and updates of the gradients."""
    if ranks.size == 1:
        return OwnGradients(ranks, layouts, lanes, optimizer)
    return SharedGradients(ranks, layouts, lanes, sequence, optimizer)
