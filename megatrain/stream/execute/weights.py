"""Working weights on the device: which block each slot holds, and the copies that bring blocks there."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor

from megatrain.plan.program.buffers import weights_buffer
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Work
from megatrain.store.state import HostState
from megatrain.stream.execute.slots import Slots
from megatrain.stream.execute.state_on_drives import StateOnDrives
from megatrain.stream.lanes import Lanes
from megatrain.stream.ranks.own_gradients import OwnGradients
from megatrain.stream.ranks.shared_gradients import SharedGradients


class Weights:
    """What slots and resident places hold. The methods named after operations return what these run."""

    def __init__(
        self,
        lanes: Lanes,
        host: HostState,
        slots: Slots,
        *,
        shared: OwnGradients,
        drives: StateOnDrives,
    ) -> None:
        """Start with empty slots.

        Args:
            lanes: The lanes in which copies run.
            host: The model's state, whose working weights are copied.
            slots: The places on the device.
            shared: The gradients of this rank, which bring weights between several.
            drives: The buffers of weights that come from drives.
        """
        self._lanes = lanes
        self._host = host
        self._slots = slots
        self._shared = shared
        self._drives = drives
        self.contents: list[int | None] = [None] * len(slots)
        """By slot: the block that is there, or will be."""
        self.stale: set[int] = set()
        """Outer blocks whose weights on the device are out of date."""

    def forget(self, stale: Iterable[int]) -> None:
        """Take note that what slots and the places of `stale` hold is old; let lanes that check know it."""
        for slot, block in enumerate(self.contents):
            if block is not None:
                self._poison(block, slot)
        self.empty()
        self.stale = set(stale)

    def empty(self) -> None:
        """Take note that the slots hold nothing."""
        self.contents = [None] * len(self._slots)

    def _poison(self, block: int, slot: int) -> None:
        place, buffer = self._slots.place(block, slot), weights_buffer(block, slot)
        self._lanes.enqueue(Lane.FETCH, lambda: self._lanes.freed(place), writes=[buffer])

    def fetch(self, block: int, slot: int, *, page: int, in_pieces: bool) -> Work:
        """Return the copy of a block's weights to its place, from RAM or from a page."""
        source = self._drives.page(block, page) if page >= 0 else self._host.blocks[block].working
        target = self._slots.place(block, slot)
        if in_pieces:
            return partial(self._fetch_piece, target, source)
        if self._host.layouts[block].encoded:
            return partial(self._slots.codes.fetch, block, target, source)
        return partial(self._lanes.copy, target, source)

    def _fetch_piece(self, target: Tensor, source: Tensor) -> None:
        for part in self._between.pieces(target.numel()):
            self._lanes.copy(target[part], source[part])

    @property
    def _between(self) -> SharedGradients:
        """Return what brings weights between ranks: the program of one has no operation for that."""
        assert isinstance(self._shared, SharedGradients)
        return self._shared

    def settle(self, block: int, slot: int) -> None:
        """Note, when a fetch is enqueued, where its block will be."""
        if slot >= 0:
            self.contents[slot] = block
        self.stale.discard(block)

    def gather(self, block: int, slot: int) -> Work:
        """Return what makes weights whole, of which each rank has fetched a piece."""
        return partial(self._between.gather, self._slots.place(block, slot))

    def gather_shares(self, block: int) -> Work:
        """Return what makes a resident block's weights whole, of which each rank has updated its share."""
        return partial(self._between.gather_shares, block, self._slots.place(block, -1))

    def spread(self, block: int, drive_staging: int) -> Work:
        """Return what makes weights on the host whole, of which each rank has updated its share."""
        return partial(self._between.spread, block, self._drives.working(block, drive_staging))
