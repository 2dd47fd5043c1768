"""The gradients of a rank that is alone: it adds up, keeps and updates all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.ownership import Share, whole_share
from megatrain.plan.program.block_size import BlockSize
from megatrain.store.state import HostState
from megatrain.stream.job.ranks import Ranks
from megatrain.stream.lanes import Lanes


class OwnGradients:
    """What a rank keeps of a step's gradients: everything, if it is alone."""

    sequence = 1
    """The number of neighbours that share out the tokens of a row."""
    shares: list[Share]
    """The part of each block's gradient that this rank keeps."""
    updated: list[Share]
    """The part of each block's state that it updates."""

    def __init__(
        self, ranks: Ranks, layouts: Sequence[BlockLayout], lanes: Lanes, optimizer: Optimizer = DEFAULT
    ) -> None:
        """Keep every block's gradient whole."""
        self.ranks = ranks
        self._layouts, self._lanes, self._optimizer = layouts, lanes, optimizer
        self.shares = self.updated = [whole_share(layout.sizes) for layout in layouts]
        sums = torch.zeros(pools.square_sums(len(layouts)), dtype=torch.uint8, device=lanes.device)
        self._squares = sums.view(torch.float64)[: len(layouts)]

    def block_size(self, block: int, *, is_streamed: bool, on_device: bool) -> BlockSize:
        """Return what a program needs to know of a block."""
        sizes = self._layouts[block].sizes
        return BlockSize.of(sizes, is_streamed=is_streamed, on_device=on_device, optimizer=self._optimizer)

    def with_optimizer(self, block: int, size: BlockSize, optimizer: Optimizer) -> BlockSize:
        """Return the size of a block with another optimizer."""
        return size.with_optimizer(self._layouts[block].sizes, optimizer)

    def keep(self, block: int, sums: Tensor, kept: Sequence[Tensor]) -> None:
        """Round a complete sum on the device, copy it to the two places, and sum its squares."""
        edge = self._layouts[block].num_split
        rounded = sums[:edge].to(torch.bfloat16), sums[edge:]
        for place, part in zip(kept, rounded, strict=True):
            self._lanes.copy(place, part)
        self.sum_squares(block, rounded)

    def hold(self, block: int, sums: Tensor, kept: Sequence[Tensor]) -> None:
        """Round a complete sum into two places on the device, and sum its squares."""
        edge = self._layouts[block].num_split
        for place, part in zip(kept, (sums[:edge], sums[edge:]), strict=True):
            place.copy_(part)
        self.sum_squares(block, kept)

    def round(self, block: int, sums: Tensor) -> None:
        """Round a complete sum to the working dtype where it is, and sum its squares."""
        edge = self._layouts[block].num_split
        rounded = sums[:edge].to(torch.bfloat16)
        sums[:edge].copy_(rounded)
        self.sum_squares(block, (rounded, sums[edge:]))

    def sum_squares(self, block: int, parts: Sequence[Tensor]) -> None:
        """Sum the squares of a complete gradient on the device."""
        self._lanes.sum_of_squares(parts, self._squares[block])

    def note_squares(self, block: int, squares: float) -> None:
        """Take note of the sum of squares of a gradient that the host has completed."""
        self._squares[block].fill_(squares)

    def sums(self, blocks: Sequence[int]) -> list[float]:
        """Return the sums of squares of complete gradients."""
        values = self._squares.tolist()
        return [values[block] for block in blocks]

    def show_gradients(self, host: HostState) -> None:
        """Leave them where they are: readable."""
