"""State of several nodes of which each has a part on drives of its own.

What must stay true: an image holds what its node keeps and nothing else. Blocks that are lent are whole, in
memory of their own, and a node's part goes between them and its image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.runs import SumRoom
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.ownership import whole_share
from megatrain.store.arena import Arena
from megatrain.store.nodes import NodeParts, PartedState
from megatrain.store.on_drives import Image
from megatrain.store.placement import Tiers
from megatrain.store.ranks import StateRanks
from megatrain.store.state import BlockState, Precision
from megatrain.store.tiered import TieredState


class NodeTieredState(PartedState, TieredState):
    """The state of one node, in RAM as far as the placement says so."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        precision: Precision,
        tiers: Tiers,
        optimizer: Optimizer,
        *,
        sum_room: SumRoom,
        ranks: StateRanks,
    ) -> None:
        """Allocate as `TieredState`, for ranks among whose nodes the state is shared out."""
        self._nodes = ranks
        self._parts = NodeParts(layouts, ranks, optimizer)
        super().__init__(layouts, precision, tiers, optimizer, sum_room=sum_room, ranks=ranks)
        self._wholes = [
            Image(layout, whole_share(layout.sizes), layout.sizes, optimizer, ()) for layout in layouts
        ]
        """Of blocks that are lent."""
        away = self.on_drives.placement.state_on_drives
        most = max((self._wholes[block].num_bytes for block in away), default=0)
        self._lent = Arena(most, ranks.shared_memory(most))
        """Where a block on drives is whole while all ranks of the node borrow it; else no page is there."""

    def _brought(self, block: int) -> BlockState:
        if not self.on_drives.holds_state(block):
            return super()._brought(block)
        image = self._wholes[block]
        state = self._view(block, image, self._lent.view(torch.uint8, 0, image.num_bytes))
        if self._nodes.local_rank == 0:
            buffer = self._buffer(block)
            self.on_drives.read(block, buffer, working=self.on_drives.holds_working(block))
            self._take_in(block, state, buffer)
        return state

    def _drop(self, block: int) -> None:
        super()._drop(block)
        if self._nodes.local_rank == 0 and self.on_drives.holds_state(block):
            self._lent.give_back(self._lent.view(torch.uint8, 0, self._lent.nbytes))

    def _give_back(self, block: int) -> None:
        if not self.on_drives.holds_state(block):
            super()._give_back(block)

    def _lend(self, number: int) -> tuple[BlockState, Tensor]:
        image = self._wholes[number]
        memory = Arena(image.num_bytes).view(torch.uint8, 0, image.num_bytes)
        return self._view(number, image, memory), self._buffer(number)

    def _kept_of(self, block: int, state: BlockState, plane: str) -> list[Tensor]:
        return self._parts.own(block, state, [plane])

    def _take_in(self, block: int, lent: BlockState, buffer: Tensor) -> None:
        for inside, whole in self._pairs(block, lent, buffer):
            whole.copy_(inside)

    def _take_out(self, block: int, lent: BlockState, buffer: Tensor) -> None:
        for inside, whole in self._pairs(block, lent, buffer):
            inside.copy_(whole)

    def _pairs(self, block: int, lent: BlockState, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what of an image is what of a whole block."""
        image = self.on_drives.images[block]
        if self.on_drives.holds_working(block):
            yield image.working(buffer), lent.working
        for name, plane in image.planes(buffer).items():
            start = 0
            for part in self._parts.own(block, lent, [name]):
                yield plane[start : start + part.numel()], part
                start += part.numel()
