"""What a rank owns of the sum of all ranks' tensors: exchanged in its node first, then among nodes.

See `Exchange`, which says why the sum has the bits of a tree over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from megatrain.layout.exchange import Exchange
from megatrain.layout.pools import ROOM_ALIGN_BYTES
from megatrain.store.arena import Arena


class Exchanging(Protocol):
    """Ranks that send each other parts of tensors; every method is called by all, in one order."""

    node: int
    local_rank: int

    def exchange(self, mine: Tensor, counts: Sequence[int], lane: str, parts: Tensor) -> Tensor:
        """Send `counts[n]` elements of a flat tensor to the n-th of a lane's group; return all parts for us.

        The groups are `near`, of the ranks of a node, and `rail`, of those in one place on all nodes.
        """


Take = Callable[[int, list[Tensor]], object]
"""Is given a piece of what a rank owns: where it begins there, and its sums, one of each shard of rows."""


class Room:
    """Flat tensors for what is given and got, each until the end of the `piece` in which it was taken."""

    def __init__(self, memory: Tensor | None = None) -> None:
        """Take them from memory on a device, which was allocated once.

        Args:
            memory: (`pools.exchange_room`,) uint8; None: each is new memory of the host, and the kernel's:
                glibc would take it from its heap, and keep holes between other things.
        """
        self._memory = memory
        self._used = 0

    def take(self, like: Tensor, numel: int) -> Tensor:
        """Return a flat tensor of the dtype of another."""
        nbytes = numel * like.dtype.itemsize
        if self._memory is None:
            return Arena(nbytes).view(like.dtype, 0, numel)
        start = self._used
        self._used += -(-nbytes // ROOM_ALIGN_BYTES) * ROOM_ALIGN_BYTES
        assert self._used <= len(self._memory), f"{self._used} bytes of {len(self._memory)} to exchange"
        return self._memory[start : start + nbytes].view(like.dtype)

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Give back, at the end, what is taken meanwhile; a stream uses it again in its own order."""
        used = self._used
        try:
            yield
        finally:
            self._used = used


def owned_sums(
    ranks: Exchanging, exchange: Exchange, mine: Tensor, counts: Sequence[int], take: Take, room: Room
) -> None:
    """Make the sums of all ranks' flat tensors where this rank owns them, piece by piece.

    They are added up by a balanced tree in the order of the ranks that have the shard.

    Args:
        ranks: The ranks that call this together.
        exchange: The exchange, which knows how many they are.
        mine: (sum(counts),) this rank's tensor. Of what this rank owns, what was taken is no more read.
        counts: The number of elements that each rank owns.
        take: The function that is given each piece, which lasts as long as the call.
        room: The memory for what is given and got.
    """
    owned = [range(*pair) for pair in pairwise([0, *accumulate(counts)])]
    numel = exchange.piece_numel
    for start in range(0, max(counts), numel):
        parts = [own[start : start + numel] for own in owned]
        with room.piece():
            take(start, _exchanged(ranks, exchange, mine, parts, room))


def _exchanged(
    ranks: Exchanging, exchange: Exchange, mine: Tensor, parts: Sequence[range], room: Room
) -> list[Tensor]:
    """Return the sums of this rank's part, of which there is one for each rank."""
    size, place, num_sums = exchange.num_peers, ranks.local_rank, exchange.num_sums
    counts = [*map(len, parts)]
    if exchange.num_nodes == 1:
        return _by_shard(_got(ranks, _joined(mine, parts, room), counts, "near", place, room), exchange)
    rail = [num_sums * own for own in counts[place::size]]
    if size == 1:
        sent = _joined(mine, parts, room)
    else:
        sent = room.take(mine, sum(rail))
        for node, target in enumerate(sent.split(rail)):
            own = slice(node * size, (node + 1) * size)
            with room.piece():
                _add_up(  # what is given and got has no name, so that it ends before the next is made
                    _got(ranks, _joined(mine, parts[own], room), counts[own], "near", place, room),
                    target.view(num_sums, counts[node * size + place]),
                )
    found = _got(ranks, sent, rail, "rail", ranks.node, room)
    return _by_shard(found.view(exchange.num_nodes * num_sums, counts[ranks.node * size + place]), exchange)


def _got(ranks: Exchanging, sent: Tensor, counts: Sequence[int], lane: str, place: int, room: Room) -> Tensor:
    """Exchange in new room; `place` is this rank's in the lane's group."""
    return ranks.exchange(sent, counts, lane, room.take(sent, len(counts) * counts[place]))


def _joined(flat: Tensor, parts: Sequence[range], room: Room) -> Tensor:
    """Return parts of a flat tensor behind one another: where they are so already, they are not copied."""
    if all(part.stop == following.start for part, following in pairwise(parts)):
        return flat[parts[0].start : parts[-1].stop]
    found = room.take(flat, sum(map(len, parts)))
    return torch.cat([flat[part.start : part.stop] for part in parts], out=found)


def tree(parts: Sequence[Tensor]) -> Tensor:
    """Add up so many tensors as a power of two by a balanced tree, in place; return the sum."""
    step = 1
    while step < len(parts):
        for place in range(0, len(parts), 2 * step):
            parts[place].add_(parts[place + step])
        step *= 2
    return parts[0]


def _by_shard(parts: Tensor, exchange: Exchange) -> list[Tensor]:
    """Add up what nodes, or ranks, have of each shard of rows."""
    ordered = [parts[number] for number in exchange.order]
    size = len(ordered) // exchange.sequence
    return [tree(ordered[first : first + size]) for first in range(0, len(ordered), size)]


def _add_up(parts: Tensor, sums: Tensor) -> None:
    """Add up what a node's ranks have of each shard of rows, of which they have parts in turn."""
    for shard, target in enumerate(sums):
        target.copy_(tree([*parts[shard :: len(sums)]]))
