"""What each of several nodes keeps of a state: all working weights, and of the rest what its ranks own.

Every node has planes of full size with the same indices, in memory of its own. Pages outside of its part are
not there: nobody writes to them, but for as long as something is brought from other nodes. Nobody reads them
either, since a read takes a page too. A single node keeps everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.layout.blocks import BlockLayout, Entry
from megatrain.layout.ownership import Share, node_shares, shares, state_shares, whole_share
from megatrain.store.arena import Arena
from megatrain.store.block_state import BlockState, part_of_plane
from megatrain.store.ranks import StateRanks


class NodeParts:
    """What each node keeps of blocks, and how its ranks bring the parts of others."""

    def __init__(self, layouts: Sequence[BlockLayout], nodes: StateRanks, optimizer: Optimizer) -> None:
        """Cut every block's state among the nodes."""
        self._nodes = nodes
        self.are_several = nodes.num_nodes > 1
        self.has_scales = optimizer.has_scales
        self._kept = [[whole_share(layout.sizes)] for layout in layouts]
        for number, layout in enumerate(layouts) if self.are_several else ():
            cut = state_shares(shares(layout.sizes, number, nodes.size), optimizer, layout.scaled_edge)
            self._kept[number] = node_shares(cut, nodes.num_nodes)

    def own(self, block: int, state: BlockState, planes: Sequence[str]) -> list[Tensor]:
        """View what this node keeps of planes of a block: of its working weights all."""
        return self._of(block, state, self._nodes.node, planes)

    def elements(self, block: int, state: BlockState, node: int | None = None) -> dict[str, range]:
        """Return which elements a node keeps of each tensor of `BlockState.optimizer_tensors`, flat.

        Args:
            block: The number of the block.
            state: The block.
            node: The number of the node; None: this one.
        """
        layout, kept = state.layout, self._kept[block][self._nodes.node if node is None else node]
        found = {}
        for plane, tensor in state.planes.items():
            has_scales = plane != "remainder" and tensor.numel() != layout.num_state
            for entry in layout.trained:
                if plane == "remainder" and entry.dtype != torch.bfloat16:
                    continue
                if has_scales:
                    found[f"{plane}/{entry.key}"] = _scales_in(layout, entry, kept)
                else:
                    start = entry.state_offset or 0
                    (part,) = kept.cut(start, start + entry.numel) or [range(start, start)]
                    found[f"{plane}/{entry.key}"] = range(part.start - start, part.stop - start)
        return found

    def bring(self, block: int, state: BlockState, planes: Sequence[str]) -> None:
        """Fill the parts of other nodes: the first rank of each does it for the others."""
        planes = planes if self._nodes.local_rank == 0 else ()
        self._nodes.spread([self._of(block, state, node, planes) for node in range(self._nodes.num_nodes)])
        self._nodes.meet("spread")

    def give_back(
        self, block: int, state: BlockState, planes: Sequence[str], arena_of: Callable[[str, int], Arena]
    ) -> None:
        """Drop the parts of other nodes in planes that all ranks of the node map.

        Args:
            block: The number of the block.
            state: The block.
            planes: The names of the planes.
            arena_of: A function that returns the memory that has a plane of a block.
        """
        for plane in planes:
            for node in range(self._nodes.num_nodes):
                for part in self._of(block, state, node, [plane]) if node != self._nodes.node else ():
                    arena_of(plane, block).give_back(part)

    def _of(self, block: int, state: BlockState, node: int, planes: Sequence[str]) -> list[Tensor]:
        found = []
        for plane in planes:
            whole = state.find_plane(plane)  # one on drives has none
            if whole is None or plane == "working":
                found += [] if whole is None else [whole]
            else:
                found += part_of_plane(state.layout, plane, whole, self._kept[block][node])
        return [part for part in found if part.numel()]


def _scales_in(layout: BlockLayout, entry: Entry, kept: Share) -> range:
    """Return which scales of a parameter a share has, which ends where scales do."""
    start, stop = layout.scale_ranges[entry.name]
    for part in kept.ranges:
        own = layout.scales_of(part)
        first, last = max(start, own.start), min(stop, own.stop)
        if first < last:
            return range(first - start, last - start)
    return range(0)
