"""The gradients of a rank that is alone: it adds up, keeps and updates all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
        largest = max((layout.sizes.num_state for layout in layouts), default=0)
        in_chunks = lanes.squares_in_chunks
        nbytes = pools.gradient_scratch(largest, in_chunks=in_chunks)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=lanes.device)
        piece, sums_numel = pools.wide_numels(largest, in_chunks)
        wide, low = scratch.split([8 * (piece + sums_numel), nbytes - 8 * (piece + sums_numel)])
        self._wide, self._chunk_sums = wide.view(torch.float64).split([piece, sums_numel])
        self._low = low.view(torch.bfloat16)

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
        places = zip((sums[:edge], sums[edge:]), kept, strict=True)
        self._square(block, [self._sent(part, place) for part, place in places])

    def send(self, sums: Tensor, place: Tensor) -> None:
        """Copy fp32 values on the device to a place on the host, each rounded to its dtype."""
        for _ in self._sent(sums, place):
            pass

    def _sent(self, sums: Tensor, place: Tensor) -> Iterator[Tensor]:
        """Yield what is sent, in pieces: each is there until the next is asked for."""
        if place.dtype == sums.dtype:
            self._lanes.copy(place, sums)
            yield sums
            return
        for part, target in zip(sums.split(len(self._low)), place.split(len(self._low)), strict=True):
            rounded = self._low[: len(part)].copy_(part)
            self._lanes.copy(target, rounded)
            yield rounded

    def hold(self, block: int, sums: Tensor, kept: Sequence[Tensor]) -> None:
        """Round a complete sum into two places on the device, and sum its squares."""
        edge = self._layouts[block].num_split
        for place, part in zip(kept, (sums[:edge], sums[edge:]), strict=True):
            place.copy_(part)
        self.sum_squares(block, kept)

    def round(self, block: int, sums: Tensor) -> None:
        """Round a complete sum to the working dtype where it is, and sum its squares."""
        edge = self._layouts[block].num_split
        for part in sums[:edge].split(len(self._low)):
            part.copy_(self._low[: len(part)].copy_(part))
        self.sum_squares(block, (sums[:edge], sums[edge:]))

    def sum_squares(self, block: int, parts: Sequence[Tensor]) -> None:
        """Sum the squares of a complete gradient on the device."""
        self._square(block, [(part,) for part in parts])

    def _square(self, block: int, parts: Sequence[Iterable[Tensor]]) -> None:
        self._lanes.sum_of_squares(parts, self._squares[block], self._wide, self._chunk_sums)

    def note_squares(self, block: int, squares: float) -> None:
        """Take note of the sum of squares of a gradient that the host has completed."""
        self._squares[block].fill_(squares)

    def sums(self, blocks: Sequence[int]) -> list[float]:
        """Return the sums of squares of complete gradients."""
        values = self._squares.tolist()
        return [values[block] for block in blocks]

    def show_gradients(self, host: HostState) -> None:
        """Leave them where they are: readable."""
