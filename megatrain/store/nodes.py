"""State of which each of several nodes keeps a part: all working weights, and of the rest what its ranks own.

Every node has planes of full size with the same indices, in memory of its own. Pages outside of its part are
not there: nobody writes to them, but for as long as something is brought from other nodes. Nobody reads them
either, since a read takes a page too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.ownership import Share, node_shares, shares, state_shares
from megatrain.store.arena import Arena
from megatrain.store.ranks import StateRanks
from megatrain.store.state import BlockState, HostState, Precision, split_gradient


class NodeParts:
    """What each node keeps of blocks, and how its ranks bring the parts of others."""

    def __init__(self, layouts: Sequence[BlockLayout], nodes: StateRanks, optimizer: Optimizer) -> None:
        """Cut every block's state among the nodes."""
        self._nodes = nodes
        self._layouts = layouts
        self._kept = [
            node_shares(
                state_shares(shares(layout.sizes, number, nodes.size), optimizer, layout.scaled_edge),
                nodes.num_nodes,
            )
            for number, layout in enumerate(layouts)
        ]
        self._filled = [0] * len(layouts)
        """By block: elements that have been put there."""

    def own(self, block: int, state: BlockState, planes: Sequence[str]) -> list[Tensor]:
        """View what this node keeps of planes of a block."""
        return self._of(block, state, self._nodes.node, planes)

    def is_complete(self, block: int, numel: int) -> bool:
        """Whether a block is complete with so many elements more; then it is counted anew."""
        self._filled[block] += numel
        if self._filled[block] < self._layouts[block].num_parameters:
            return False
        self._filled[block] = 0
        return True

    def bring(self, block: int, state: BlockState, planes: Sequence[str]) -> None:
        """Fill the parts of other nodes: the first rank of each does it for the others."""
        planes = planes if self._nodes.local_rank == 0 else ()
        self._nodes.spread([self._of(block, state, node, planes) for node in range(self._nodes.num_nodes)])
        self._nodes.meet("spread")

    def give_back(
        self, block: int, state: BlockState, planes: Sequence[str], arenas: Mapping[str, Arena]
    ) -> None:
        """Drop the parts of other nodes in planes that all ranks of the node map."""
        for plane in planes:
            for node in range(self._nodes.num_nodes):
                for part in self._of(block, state, node, [plane]) if node != self._nodes.node else ():
                    arenas[plane].give_back(part)

    def bytes_of(
        self, blocks: Sequence[BlockState], found: Mapping[str, int], parted: Collection[str]
    ) -> dict[str, int]:
        """Return bytes by plane, where those of planes that are kept in parts are the bytes of them all."""
        own = {
            plane: [part for number, state in enumerate(blocks) for part in self.own(number, state, [plane])]
            for plane in found
            if plane in parted
        }
        return {**found, **{plane: sum(part.nbytes for part in parts) for plane, parts in own.items()}}

    def _of(self, block: int, state: BlockState, node: int, planes: Sequence[str]) -> list[Tensor]:
        found = []
        for plane in planes:
            whole = state.find_plane(plane)  # one on drives has none
            if whole is not None:
                found += part_of_plane(state.layout, plane, whole, self._kept[block][node])
        return [part for part in found if part.numel()]


class PartedState(HostState):
    """State of which a node keeps a part: its planes have holes, and blocks are whole where they are lent."""

    _nodes: StateRanks
    _parts: NodeParts
    call_others: Callable[[int], object] | None = None
    """Lets the others `lend` a block to this rank, which reads by itself; None: all borrow together."""

    @property
    def parted(self) -> tuple[str, ...]:
        """Planes of which each node keeps its part, beside the gradients."""
        return ("remainder", *self.optimizer.planes)

    @property
    def plane_bytes(self) -> dict[str, int]:
        """Bytes of each plane on this node, and of this rank's own buffers."""
        return self._parts.bytes_of(self.blocks, super().plane_bytes, (*self.parted, "gradient"))

    def put(self, name: str, value: Tensor, region: tuple[int | slice, ...] = ()) -> None:
        """Write as the state of one node does; of a block that is complete, only this node's part stays."""
        super().put(name, value, region)
        number = self.number_of(name)
        if self._parts.is_complete(number, value.numel()):
            self._give_back(number)

    def arena(self, plane: str) -> Arena | None:
        """Return a plane's arena, to lock its pages; None of one that is here in part: locking takes all."""
        return None if plane in (*self.parted, "gradient") else super().arena(plane)

    @contextmanager
    def borrow(self, block: int, *, writes: bool = False) -> Iterator[BlockState]:
        """Lend a block whose other parts come from the nodes that keep them; see `call_others`.

        Where the caller `writes`, nothing comes from other nodes, and what is not of this one is dropped: the
        first rank of each node does it, with the same values.
        """
        if writes:
            with super().borrow(block, writes=True) as lent:
                yield lent
            self._give_back(block)
            return
        call = self.call_others
        if call is not None:
            call(block)
        state = self._bring(block)
        try:
            yield state
        finally:
            if call is None:
                self._nodes.meet("spread")
            self._drop(block)

    def lend(self, block: int) -> None:
        """Take part in what the first rank of all borrows by itself."""
        self._bring(block)
        self._drop(block)

    def bring_gradients(self) -> None:
        """Make all complete gradients readable on every node, whose whole plane is in memory from then on."""
        for number, state in enumerate(self.blocks):
            self._parts.bring(number, state, ["gradient"])

    def _bring(self, block: int) -> BlockState:
        """Return the whole block: all ranks call it."""
        state = self._brought(block)
        self._parts.bring(block, state, self.parted)
        return state

    def _brought(self, block: int) -> BlockState:
        """Return a block in which this node's part is, and the others have their places."""
        return self.blocks[block]

    def _drop(self, block: int) -> None:
        if self._nodes.local_rank == 0:
            self._give_back(block)

    def _give_back(self, block: int) -> None:
        """Drop what other nodes keep of a block's planes."""
        self._parts.give_back(block, self.blocks[block], self.parted, self._arenas)


class NodeState(PartedState):
    """The state of one node, in RAM."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        precision: Precision,
        nodes: StateRanks,
        optimizer: Optimizer = DEFAULT,
    ) -> None:
        """Allocate as `HostState`, for nodes among which the state of an optimizer is shared out."""
        self._nodes = nodes
        self.has_scales = optimizer.has_scales
        self._parts = NodeParts(layouts, nodes, optimizer)
        super().__init__(layouts, precision, shared=nodes.shared_memory)


def part_of_plane(layout: BlockLayout, plane: str, whole: Tensor, share: Share) -> list[Tensor]:
    """View a share of a plane of a block: what it has of bf16 parameters, and of others."""
    split, full = share.split, share.full
    if plane == "gradient":
        low, high = split_gradient(whole, layout)
        start = full.start - layout.num_split
        return [low[split.start : split.stop], high[start : start + len(full)] if full else high[:0]]
    if plane == "remainder":
        return [whole[split.start : split.stop]]
    if whole.numel() != layout.num_state:  # of scales
        return [whole[layout.scales_of(part)] for part in share.ranges]
    return [whole[split.start : split.stop], whole[full.start : full.stop]]
