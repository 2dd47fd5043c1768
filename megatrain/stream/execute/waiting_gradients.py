"""Complete gradients that wait on the device until the norm is known, and how they get to their updates.

They take the place of the host's gradient plane, 2 bytes per parameter in bf16: exact clipping then needs 12
bytes per parameter of host memory. After the norm each block's gradient passes through one of a few host
buffers on its way to its update.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from megatrain.layout.blocks import BlockLayout, aligned
from megatrain.stream.lanes import Lanes


class WaitingGradients:
    """Device memory for the complete gradients of all streamed blocks, in one piece."""

    def __init__(self, lanes: Lanes, layouts: Sequence[BlockLayout], streamed: Sequence[bool]) -> None:
        """Allocate it: each block's gradient bytes."""
        self._lanes = lanes
        self._flat: Tensor | None = lanes.allocate(waiting_bytes(layouts, streamed))
        self._places: dict[int, Tensor] = {}
        start = 0
        for block, (layout, flag) in enumerate(zip(layouts, streamed, strict=True)):
            if flag:
                self._places[block] = self._flat[start : start + layout.gradient_bytes]
                start += layout.gradient_bytes

    def place(self, block: int) -> Tensor:
        """Return the (gradient_bytes,) uint8 place of a streamed block's gradient."""
        return self._places[block]

    def release(self) -> None:
        """Give the memory back."""
        if self._flat is not None:
            self._lanes.free([self._flat])
        self._flat = None
        self._places.clear()


def waiting_bytes(layouts: Sequence[BlockLayout], streamed: Sequence[bool]) -> int:
    """Return the bytes of all streamed blocks' complete gradients."""
    return sum(layout.gradient_bytes for layout, flag in zip(layouts, streamed, strict=True) if flag)


def staging_bytes(layouts: Sequence[BlockLayout], on_device: Collection[int]) -> int:
    """Return the bytes of one staging buffer: the largest gradient of blocks not updated `on_device`."""
    away = (layout.gradient_bytes for block, layout in enumerate(layouts) if block not in on_device)
    return aligned(max(away, default=0))
