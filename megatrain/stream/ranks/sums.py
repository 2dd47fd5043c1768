"""What a rank owns of the sum of all ranks' tensors: exchanged in its node first, then among nodes.

See `Exchange`, which says why the sum has the bits of a tree over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megatrain.layout.exchange import Exchange


class Exchanging(Protocol):
    """Ranks that send each other parts of tensors; every method is called by all, in one order."""

    node: int
    local_rank: int

    def exchange(self, mine: Tensor, counts: Sequence[int], lane: str) -> Tensor:
        """Send `counts[n]` elements of a flat tensor to the n-th of a lane's group; return all parts for us.

        The groups are `near`, of the ranks of a node, and `rail`, of those in one place on all nodes.
        """


def owned_sums(ranks: Exchanging, exchange: Exchange, mine: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return the sums of all ranks' flat tensors where this rank owns them, one of each shard of rows.

    Args:
        ranks: That call this together.
        exchange: How many they are.
        mine: (sum(counts),) this rank's tensor.
        counts: How many elements each rank owns.

    Returns:
        (counts[rank],) each, added up by a balanced tree in the order of the ranks that have the shard.
    """
    size, place, num_sums = exchange.num_peers, ranks.local_rank, exchange.num_sums
    if exchange.num_nodes == 1:
        return _by_shard(ranks.exchange(mine, counts, "near"), exchange)
    rail = [num_sums * own for own in counts[place::size]]
    sent = mine if size == 1 else mine.new_empty(sum(rail))
    if size > 1:
        by_node = [counts[first : first + size] for first in range(0, len(counts), size)]
        parts = zip(mine.split([sum(own) for own in by_node]), by_node, sent.split(rail), strict=True)
        for part, of_node, target in parts:
            _add_up(ranks.exchange(part, of_node, "near"), target.view(num_sums, of_node[place]))
    numel = counts[ranks.node * size + place]
    found = ranks.exchange(sent, rail, "rail")
    return _by_shard(found.view(exchange.num_nodes * num_sums, numel), exchange)


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
