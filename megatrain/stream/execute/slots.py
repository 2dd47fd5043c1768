"""Device memory of the engine: a ring of slots for streamed blocks, one place for each resident block.

A place is a byte buffer with a block's working bytes. Weights are seen through *aliases*: tensors that share
the buffer's storage without being views of it, so that a new fetch does not disturb autograd's version
counters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout, Entry
from megatrain.layout.totals import Residency
from megatrain.stream.execute.codes import Codes
from megatrain.stream.lanes import Lanes


class Slots:
    """Slots and resident places, and the aliases of each block's parameters in them."""

    def __init__(
        self, lanes: Lanes, layouts: Sequence[BlockLayout], blocks: Residency, num_slots: int
    ) -> None:
        """Allocate `num_slots` slots as large as the largest streamed block, and all resident places."""
        self._lanes = lanes
        self._layouts = layouts
        self.slot_bytes = blocks.streamed.largest(pools.slot)
        self._slots = [lanes.allocate(self.slot_bytes) for _ in range(num_slots if blocks.streamed else 0)]
        self._resident = {
            block: lanes.allocate(pools.resident_weights(layouts[block].sizes)) for block in blocks.staying
        }
        self.codes = Codes(lanes, layouts, blocks)
        """The way of encoded weights to these places."""
        self._aliases: dict[tuple[int, int], list[Tensor]] = {}
        self._places: dict[tuple[int, int], Tensor] = {}

    def release(self) -> None:
        """Give the device memory back."""
        self._lanes.free([*self._slots, *self._resident.values()])
        self._slots, self._resident = [], {}
        self.codes.release()
        self._aliases.clear()
        self._places.clear()

    def __len__(self) -> int:
        """Number of slots in the ring."""
        return len(self._slots)

    def place(self, block: int, slot: int) -> Tensor:
        """Return the (working_bytes,) uint8 buffer of a block: in a slot, or its own if `slot` is -1."""
        found = self._places.get((block, slot))
        if found is None:
            whole = self._resident[block] if slot < 0 else self._slots[slot]
            found = self._places[block, slot] = whole[: self._layouts[block].working_bytes]
        return found

    def aliases(self, block: int, slot: int) -> list[Tensor]:
        """Return one tensor per layout entry that shares the place's memory. Detach before use in a graph."""
        found = self._aliases.get((block, slot))
        if found is None:
            place = self.place(block, slot)
            entries = self._layouts[block].entries
            found = self._aliases[block, slot] = [alias(place, entry) for entry in entries]
        return found


def alias(place: Tensor, entry: Entry) -> Tensor:
    """Make a tensor of the entry's shape in `place`'s storage, with a version counter of its own."""
    start = place.storage_offset() + entry.byte_offset
    stride = torch.empty(entry.shape, device="meta").stride()
    with torch.inference_mode(False):  # aliases are kept, and an inference tensor never enters a graph
        return torch.empty(0, dtype=entry.dtype, device=place.device).set_(
            place.untyped_storage(), start // entry.dtype.itemsize, entry.shape, stride
        )
