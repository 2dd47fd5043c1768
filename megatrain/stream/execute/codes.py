"""Weights that are kept encoded on the host become values on the device, in their block's place.

A block's codes cross the link into memory that all blocks share, and are decoded from there in the lane that
has copied them, which allocates nothing. So there is room for one block, the largest: the lane does one after
the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.encoding import Scratch
from megatrain.layout.totals import Residency
from megatrain.store.block_state import decode_into, view_place
from megatrain.stream.lanes import Lanes


class Codes:
    """The device memory in which codes become values; none where nothing is encoded."""

    def __init__(self, lanes: Lanes, layouts: Sequence[BlockLayout], blocks: Residency) -> None:
        """Allocate room for the codes of the largest block, and for what decoding takes."""
        self._lanes = lanes
        self._layouts = layouts
        for layout in layouts:
            for entry in layout.encoded:
                assert entry.encoding is not None
                entry.encoding.prepare(lanes.device)
        self._buffer = lanes.allocate(blocks.all.largest(pools.codes))

    def release(self) -> None:
        """Give the device memory back."""
        self._lanes.free([self._buffer])
        self._buffer = self._buffer[:0]

    def fetch(self, block: int, place: Tensor, working: Tensor) -> None:
        """Bring a block's weights to the device: those that are not encoded as they are, and the others.

        Args:
            block: The number of the block.
            place: Its place on the device, (working_bytes,).
            working: Its weights on the host, (kept_bytes,).
        """
        edge = self._layouts[block].plain_bytes
        self._lanes.copy(place[:edge], working[:edge])
        self.bring(block, place, working[edge:])

    def bring(self, block: int, place: Tensor, codes: Tensor) -> None:
        """Bring the codes of a block to the device, and write the weights that they make into its place."""
        here, scratch = self._buffer[: codes.numel()], Scratch(self._buffer[codes.numel() :])
        self._lanes.copy(here, codes)
        for entry in self._layouts[block].encoded:
            decode_into(view_place(place, entry), here, entry, scratch)
