"""Gradients on drives: complete ones until the norm is known, and sums of them until the next round."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.ownership import Share
from megatrain.plan.program.operations import Work
from megatrain.store.drives.scratch import Place, ScratchFiles
from megatrain.store.on_drives import page_memory


class ParkedGradients:
    """The room that blocks' gradients, and their sums, have on drives; each keeps it once it was taken."""

    def __init__(
        self, scratch: ScratchFiles, layouts: Sequence[BlockLayout], shares: Sequence[Share], num_ranks: int
    ) -> None:
        """Take no room yet.

        Args:
            scratch: The room on drives.
            layouts: The layouts of the blocks.
            shares: The share of each block's complete gradient that this rank keeps.
            num_ranks: The number of ranks that keep shares.
        """
        self._scratch = scratch
        self._layouts = layouts
        self._shares, self._num_ranks = shares, num_ranks
        self.places: dict[tuple[int, bool], list[tuple[range, Place]]] = {}
        """By block, the room where these bytes of its gradient wait, and those of its sum."""

    def park(self, block: int, buffer: Tensor, *, is_sum: bool) -> Work:
        """Return the write of what a buffer holds: a gradient, or a sum in fp32.

        Raises:
            MegatrainError: A drive has no room for it.
        """
        key = block, is_sum
        if key not in self.places:
            self.places[key] = [(span, self._scratch.take(len(span))) for span in self._spans(*key)]
        places = self.places[key]

        def write() -> None:
            for span, place in places:
                self._scratch.write(place, buffer[span.start : span.stop])

        return write

    def unpark(self, block: int, buffer: Tensor, *, is_sum: bool) -> None:
        """Read what waits there into a buffer."""
        for span, place in self.places[block, is_sum]:
            what = "sum of gradients" if is_sum else "gradient"
            self._scratch.read(place, buffer[span.start : span.stop], f"the {what} of block {block}")

    def read(self, block: int, *, is_sum: bool) -> Tensor:
        """Return the uint8 gradient, or sum, that waits there, in new memory."""
        layout, (*_, span) = self._layouts[block], self._spans(block, is_sum)
        buffer = page_memory(span.stop)
        self.unpark(block, buffer, is_sum=is_sum)
        return buffer[: 4 * layout.num_state if is_sum else layout.gradient_bytes]

    def close(self) -> None:
        """Give the room back."""
        self._scratch.close()
        self.places.clear()

    def _spans(self, block: int, is_sum: bool) -> list[range]:
        """Return the bytes of a block's gradient, or sum, that wait on drives, in whole pages."""
        sizes = self._layouts[block].sizes
        if is_sum:
            return [range(pools.parked_sum(sizes))]
        if self._num_ranks == 1:
            return [range(pools.parked_gradient(sizes))]
        return self._shares[block].gradient_pages(sizes.num_split)
