"""State of which each of several nodes keeps a part: all working weights, and of the rest what its ranks own.

Every node has planes of full size with the same indices, in memory of its own. Pages outside of its part are
not there: nobody writes to them, but for as long as something is brought from other nodes. Nobody reads them
either, since a read takes a page too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from megatrain.layout.blocks import BlockLayout
from megatrain.layout.moments import MOMENT_PLANES, MomentFormat
from megatrain.layout.ownership import Share, node_shares, shares, state_shares
from megatrain.store.arena import Arena
from megatrain.store.state import BlockState, HostState, Precision, split_gradient

DRIVES_OVER_NODES = "state on drives (memory.tiers) is kept on one node; use one, or RAM alone"

_PARTED = ("remainder", *MOMENT_PLANES)


class Nodes(Protocol):
    """What is needed of the ranks of several nodes: every method is called by all, in one order."""

    size: int
    num_nodes: int
    node: int
    local_rank: int

    def meet(self, lane: str = "caller") -> None:
        """Wait until every rank, or, in lane `spread`, every rank of the node, has come here."""

    def spread(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Bring parts, given by node, from each node to the others."""

    def shared_memory(self, nbytes: int) -> int:
        """Return a descriptor of memory that every rank of the node maps."""


class NodeState(HostState):
    """The state of one node."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        precision: Precision,
        nodes: Nodes,
        planned: MomentFormat = MomentFormat.FP32,
    ) -> None:
        """Allocate as `HostState`, for nodes among which the state is shared out with `planned` moments."""
        self._nodes = nodes
        self.has_scales = planned is MomentFormat.INT8
        self._kept = [
            node_shares(
                state_shares(
                    shares(layout.sizes, number, nodes.size), layout.scaled_edge if self.has_scales else None
                ),
                nodes.num_nodes,
            )
            for number, layout in enumerate(layouts)
        ]
        self._filled = [0] * len(layouts)
        """By block: elements that have been put there."""
        self.call_others: Callable[[int], object] | None = None
        """Lets the others `lend` a block to this rank, which reads by itself; None: all borrow together."""
        super().__init__(layouts, precision, shared=nodes.shared_memory)

    @property
    def plane_bytes(self) -> dict[str, int]:
        """Bytes of each plane on this node, and of this rank's own buffers."""
        found = super().plane_bytes
        for plane in found.keys() & {*_PARTED, "gradient"}:
            found[plane] = sum(
                part.nbytes
                for number in range(len(self.blocks))
                for part in self._parts(number, self._nodes.node, [plane])
            )
        return found

    def put(self, name: str, value: Tensor, region: tuple[int | slice, ...] = ()) -> None:
        """Write as `HostState` does; of a block that is complete, only this node's part stays."""
        super().put(name, value, region)
        number = self.number_of(name)
        self._filled[number] += value.numel()
        if self._filled[number] >= self.layouts[number].num_parameters:
            self._filled[number] = 0
            self._give_back(number, _PARTED)

    def arena(self, plane: str) -> Arena | None:
        """Return a plane's arena, to lock its pages; None of one that is here in part: locking takes all."""
        return None if plane in (*_PARTED, "gradient") else super().arena(plane)

    @contextmanager
    def borrow(self, block: int, *, writes: bool = False) -> Iterator[BlockState]:
        """Lend a block whose other parts come from the nodes that keep them; see `call_others`.

        Where the caller `writes`, nothing comes from other nodes, and what is not of this one is dropped: the
        first rank of each node does it, with the same values.
        """
        if writes:
            yield self.blocks[block]
            self._give_back(block, _PARTED)
            return
        call = self.call_others
        if call is not None:
            call(block)
        self._bring(block, _PARTED)
        try:
            yield self.blocks[block]
        finally:
            if call is None:
                self._nodes.meet("spread")
            if self._nodes.local_rank == 0:
                self._give_back(block, _PARTED)

    def lend(self, block: int) -> None:
        """Take part in what the first rank of all borrows by itself."""
        self._bring(block, _PARTED)
        if self._nodes.node > 0 and self._nodes.local_rank == 0:
            self._give_back(block, _PARTED)

    def bring_gradients(self) -> None:
        """Make all complete gradients readable on every node, whose whole plane is in memory from then on."""
        for number in range(len(self.blocks)):
            self._bring(number, ["gradient"])

    def _bring(self, block: int, planes: Sequence[str]) -> None:
        """Fill the parts of other nodes: the first rank of each does it for the others."""
        planes = planes if self._nodes.local_rank == 0 else ()
        self._nodes.spread([self._parts(block, node, planes) for node in range(self._nodes.num_nodes)])
        self._nodes.meet("spread")

    def _give_back(self, block: int, planes: Sequence[str]) -> None:
        """Drop the parts of other nodes."""
        for plane in planes:
            for node in range(self._nodes.num_nodes):
                for part in self._parts(block, node, [plane]) if node != self._nodes.node else ():
                    self._arenas[plane].give_back(part)

    def _parts(self, block: int, node: int, planes: Sequence[str]) -> list[Tensor]:
        """View what a node keeps of planes of a block."""
        state, share = self.blocks[block], self._kept[block][node]
        found = []
        for plane in planes:
            whole: Tensor | None = getattr(state, plane)
            if whole is not None:
                found += part_of_plane(state.layout, plane, whole, share)
        return [part for part in found if part.numel()]


def part_of_plane(layout: BlockLayout, plane: str, whole: Tensor, share: Share) -> list[Tensor]:
    """View a share of a plane of a block: what it has of bf16 parameters, and of others."""
    split, full = share.split, share.full
    if plane == "gradient":
        low, high = split_gradient(whole, layout)
        start = full.start - layout.num_split
        return [low[split.start : split.stop], high[start : start + len(full)] if full else high[:0]]
    if plane == "remainder":
        return [whole[split.start : split.stop]]
    if plane.endswith("_scale"):
        return [whole[layout.scales_of(part)] for part in share.ranges]
    return [whole[split.start : split.stop], whole[full.start : full.stop]]
