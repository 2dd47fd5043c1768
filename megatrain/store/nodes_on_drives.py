"""State of several nodes of which each has a part on drives of its own.

What must stay true: an image holds what its node keeps and nothing else. Blocks that are lent are whole, in
memory of their own, and a node's part goes between them and its image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatrain.config.runs import SumRoom
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.ownership import whole_share
from megatrain.store.arena import Arena
from megatrain.store.nodes import PARTED, NodeLender, NodeParts
from megatrain.store.on_drives import Image
from megatrain.store.placement import Tiers
from megatrain.store.ranks import StateRanks
from megatrain.store.state import BlockState, Precision
from megatrain.store.tiered import TieredState


class NodeTieredState(NodeLender, TieredState):
    """The state of one node, in RAM as far as the placement says so."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        precision: Precision,
        tiers: Tiers,
        *,
        sum_room: SumRoom,
        ranks: StateRanks,
    ) -> None:
        """Allocate as `TieredState`, for ranks among whose nodes the state is shared out."""
        self._nodes = ranks
        self._parts = NodeParts(layouts, ranks, has_scales=False)
        super().__init__(layouts, precision, tiers, sum_room=sum_room, ranks=ranks)
        self._wholes = [Image(layout, whole_share(layout.sizes), layout.sizes, ()) for layout in layouts]
        """Of blocks that are lent."""
        away = self.on_drives.placement.state_on_drives
        most = max((self._wholes[block].num_bytes for block in away), default=0)
        self._lent = Arena(most, ranks.shared_memory(most))
        """Where a block on drives is whole while all ranks of the node borrow it; else no page is there."""

    @property
    def plane_bytes(self) -> dict[str, int]:
        """Bytes in RAM of each plane and buffer allocated so far: of what nodes share out, its part."""
        return self._parts.bytes_of(self.blocks, super().plane_bytes)

    def put(self, name: str, value: Tensor, region: tuple[int | slice, ...] = ()) -> None:
        """Write as `TieredState` does; of a block in RAM that is complete, only this node's part stays."""
        super().put(name, value, region)
        number = self.number_of(name)
        is_complete = self._parts.is_complete(number, value.numel())
        if is_complete and not self.on_drives.holds_state(number):
            self._parts.give_back(number, self.blocks[number], PARTED, self._arenas)

    def arena(self, plane: str) -> Arena | None:
        """Return a plane's arena, to lock its pages; None of one that is here in part: locking takes all."""
        return None if plane in (*PARTED, "gradient") else super().arena(plane)

    @contextmanager
    def borrow(self, block: int, *, writes: bool = False) -> Iterator[BlockState]:
        """Lend a block as `NodeState.borrow` does."""
        if writes:
            with super().borrow(block, writes=True) as lent:
                yield lent
            if not self.on_drives.holds_state(block):
                self._parts.give_back(block, self.blocks[block], PARTED, self._arenas)
        else:
            with self._whole(block) as lent:
                yield lent

    def bring_gradients(self) -> None:
        """Make all complete gradients readable on every node, whose whole plane is in memory from then on."""
        for number, state in enumerate(self.blocks):
            self._parts.bring(number, state, ["gradient"])

    def _bring(self, block: int) -> BlockState:
        state, image = self.blocks[block], self._wholes[block]
        if self.on_drives.holds_state(block):
            state = self._view(block, self._lent.view(torch.uint8, 0, image.num_bytes))
            if self._nodes.local_rank == 0:
                buffer = self._buffer(block)
                self.on_drives.read(block, buffer, working=self.on_drives.holds_working(block))
                self._take_in(block, state, buffer)
        self._parts.bring(block, state, PARTED)
        return state

    def _drop(self, block: int) -> None:
        if self._nodes.local_rank > 0:
            return
        if self.on_drives.holds_state(block):
            self._lent.give_back(self._lent.view(torch.uint8, 0, self._lent.nbytes))
        else:
            self._parts.give_back(block, self.blocks[block], PARTED, self._arenas)

    def _lend(self, number: int) -> tuple[BlockState, Tensor]:
        num_bytes = self._wholes[number].num_bytes
        return self._view(number, Arena(num_bytes).view(torch.uint8, 0, num_bytes)), self._buffer(number)

    def _view(self, number: int, memory: Tensor) -> BlockState:
        """View a whole block in memory of its size, but for working weights that live in RAM."""
        image, state = self._wholes[number], self.blocks[number]
        is_there = self.on_drives.holds_working(number)
        lent = BlockState(state.layout, image.working(memory) if is_there else state.working)
        for name, plane in image.planes(memory).items():
            setattr(lent, name, plane)
        lent.gradient, lent.accumulator = state.gradient, state.accumulator
        return lent

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
