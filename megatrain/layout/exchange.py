"""The exchange by which the sums of all ranks become one: first among the ranks of a node, then among nodes.

A rank's *rail* are those in the same place on all nodes, itself included. In a node each gets what its rail
owns, and adds it up; then the ranks of a rail give each other these sums. So a node sends others the sum of
its ranks, not what each of them has. The ranks of a node follow one another, and are as many as a power of
two: their sum is a whole subtree of that of all ranks, and has its bits. Where ranks share out rows, the tree
is over the ranks of each shard first, so a node has a sum for each shard that it has.

A share passes in pieces, of which the next is sent when the one before is added up: what ranks take for an
exchange does not grow with the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.config.choice import StepBatch
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.ownership import planned_share

PIECE_NUMEL = 1 << 21
"""Elements of a share that pass at a time: 8 MiB from each rank to each other one, where these are few."""

_FEW = 8
"""So many ranks or nodes: where more of them speak at once, each says less. A block that one rank owns whole
would come to it from all nodes at once."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchange between the ranks of some nodes, of which each `sequence` neighbours share out rows."""

    num_ranks: int = 1
    num_nodes: int = 1
    sequence: int = 1

    @classmethod
    def of(cls, batch: StepBatch) -> Exchange:
        """Return the exchange of the ranks to which a batch is shared out."""
        return cls(batch.num_ranks, batch.num_nodes, batch.sequence)

    @property
    def num_peers(self) -> int:
        """Return the number of ranks of a node."""
        return self.num_ranks // self.num_nodes

    @property
    def num_sums(self) -> int:
        """Return how many sums a node's ranks send others: one of each shard of rows; on one node, all."""
        return self.num_peers if self.num_nodes == 1 else min(self.sequence, self.num_peers)

    @property
    def order(self) -> list[int]:
        """Return the nodes' sums, numbered by node and then by shard, as they are the leaves of a tree."""
        size, num_sums = self.num_peers, self.num_sums

        def shard(number: int) -> int:
            node, place = divmod(number, num_sums)
            return (node * size + place) % self.sequence

        return sorted(range(self.num_nodes * num_sums), key=lambda number: (shard(number), number))

    @property
    def is_staged(self) -> bool:
        """Return whether it has two stages: there are several nodes, with several ranks each."""
        return 1 < self.num_nodes < self.num_ranks

    @property
    def piece_numel(self) -> int:
        """Return the number of elements of a share that pass at a time."""
        return max(1, PIECE_NUMEL * _FEW // max(_FEW, self.num_peers, self.num_nodes * self.num_sums))

    def sent_bytes(self, numel: int, rail: int, own: int) -> int:
        """Return the bytes of a sum that a rank sends.

        Args:
            numel: The number of elements of the sum.
            rail: The number of those elements that the rank's rail owns.
            own: The number of those elements that the rank owns itself.
        """
        return 4 * (numel - rail + self.num_sums * (rail - own))

    @property
    def near_part(self) -> float:
        """Return the part of what a rank sends that goes to its node, where all own equally much."""
        return (self.num_ranks - self.num_nodes) / self._sent

    @property
    def passed_part(self) -> float:
        """Return what ranks read and write to add up, as a multiple of what each sends."""
        passed = self.num_nodes * self.num_sums + 1 if self.num_nodes > 1 else self.num_ranks + 1
        if self.is_staged:
            passed += self.num_nodes * (self.num_peers + self.num_sums)
        return passed / self._sent

    @property
    def _sent(self) -> int:
        """Return the number of shares that a rank sends; for a rank alone it is 1, in place of 0."""
        return max(1, self.sent_bytes(self.num_ranks, self.num_nodes, 1) // 4)

    def planned_bytes(self, sizes: BlockBytes) -> int:
        """Return what a plan counts as the bytes of a block's sum that a rank sends."""
        numel, own = sizes.num_state, planned_share(sizes, self.num_ranks).numel
        return self.sent_bytes(numel, min(numel, self.num_nodes * own), own)

    def passing_numel(self, own: int) -> int:
        """Return the most elements that a rank has at a time from others and for them, beside its own sum.

        Args:
            own: The number of elements of the largest share.
        """
        piece, nodes_sums = min(own, self.piece_numel), self.num_nodes * self.num_sums
        ways = 1 if piece == own else 2  # all shares are sent from where they are, and pieces put together
        if not self.is_staged:
            return ways * self.num_ranks * piece
        return piece * max(ways * self.num_peers + nodes_sums, 2 * nodes_sums)


def rail_numel(counts: Sequence[int], rank: int, num_peers: int) -> int:
    """Return how much the rail of a rank owns, where each rank owns `counts`."""
    return sum(counts[rank % num_peers :: num_peers])
