"""Working weights come to the device: from RAM, from drives through pages, or in pieces that ranks gather."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.buffers import weights_buffer
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation, Parts, Prices, Touched, Work
from megatrain.plan.program.read_ahead import read_ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch(Operation):
    """Copy a block's working weights to the device."""

    slot: int = -1
    """Slot of a streamed block; -1: it is resident."""
    page: int = -1
    """Host buffer through which weights on drives pass; -1: they are in RAM."""
    is_piece: bool = False
    """It copies a rank's piece of the weights, and a gather follows."""

    label, lane, moves = "fetch", Lane.FETCH, "fetch_bytes"
    brings_weights = True

    def touches(self) -> Touched:
        """Say that it reads the weights in RAM, or a page, and writes the block's place on the device."""
        source = ("page", self.page) if self.page >= 0 else ("working", self.block)
        return (source,), (weights_buffer(self.block, self.slot),)

    def through(self, buffer: int, nbytes: int | None = None) -> Operation:
        """Return the same from a page."""
        return replace(self, page=buffer)

    def work(self, parts: Parts) -> Work:
        """Return the copy."""
        return parts.weights.fetch(self.block, self.slot, page=self.page, in_pieces=self.is_piece)

    def seconds(self, prices: Prices) -> float:
        """Return the seconds of the copy, and of making values of codes behind it."""
        return prices.up_s(self.nbytes) + prices.decode_s(self.block)

    def settle(self, parts: Parts) -> None:
        """Note what the slot holds."""
        parts.weights.settle(self.block, self.slot)
        parts.counts.fetches += self.slot >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Operation):
    """Make weights whole on every rank, of which each has fetched a piece."""

    slot: int = -1
    """Slot of a streamed block; -1: it is resident."""

    label, lane, moves, rate = "gather", Lane.GATHER, "gathered_bytes", "gather_s"
    gathers = meets = True

    def touches(self) -> Touched:
        """Say that it reads and writes the block's place, where pieces become the whole."""
        place = (weights_buffer(self.block, self.slot),)
        return place, place

    def work(self, parts: Parts) -> Work:
        """Return the gather."""
        return parts.weights.gather(self.block, self.slot)


@dataclass(frozen=True, kw_only=True, slots=True)
class Page(Operation):
    """Read a block's weights from the drives, ahead of its fetch."""

    page: int

    label, lane, moves, rate = "page", Lane.PAGE, "drive_read_bytes", "read_s"
    brings_weights = True

    def touches(self) -> Touched:
        """Say that it reads the block's image and writes a host buffer."""
        return (("drive", self.block),), (("page", self.page),)

    def work(self, parts: Parts) -> Work:
        """Return the read."""
        return parts.drives.read_page(self.block, self.page)


def fetch_residents(sizes: Sequence[BlockSize], blocks: Iterable[int] | None = None) -> list[Operation]:
    """List the copies that bring resident blocks' new weights to the device, once per step."""
    return [
        Fetch(block=block, nbytes=sizes[block].fetch_bytes)
        for block in (range(len(sizes)) if blocks is None else blocks)
        if not sizes[block].is_streamed and not sizes[block].updates_on_device
    ]


def gathered(operations: Sequence[Operation], sizes: Sequence[BlockSize]) -> list[Operation]:
    """List operations in which every rank fetches a piece of each block's weights, and all gather them."""
    found: list[Operation] = []
    for operation in operations:
        if not isinstance(operation, Fetch) or not sizes[operation.block].gather_bytes:
            found.append(operation)
            continue
        block, size = operation.block, sizes[operation.block]
        found.append(replace(operation, is_piece=True, nbytes=size.fetch_bytes - size.gather_bytes))
        found.append(Gather(block=block, slot=operation.slot, nbytes=size.gather_bytes))
    return found


def with_weights_through(
    operations: Sequence[Operation], on_drives: Collection[int], sizes: Sequence[int], num_buffers: int
) -> list[Operation]:
    """Read the weights of blocks on drives before they are fetched to the device.

    Args:
        operations: The program, with the fetches in order.
        on_drives: The blocks whose working weights are there.
        sizes: The bytes that are read of each block.
        num_buffers: The number of host buffers, used in turn.
    """

    def is_ours(operation: Operation) -> bool:
        return isinstance(operation, Fetch) and operation.block in on_drives

    def surround(operation: Operation, buffer: int) -> tuple[Operation, list[Operation]]:
        block = operation.block
        return Page(block=block, page=buffer, nbytes=sizes[block]), [operation.through(buffer)]

    return read_ahead(operations, is_ours, surround, num_buffers)
