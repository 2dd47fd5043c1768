"""Scratch room in nameless files on drives: nothing of it is committed, and no end of a run leaves any.

Pieces are written and read as a whole, striped over the drives, with a checksum per chunk. What must stay
true: nobody reads or writes a chunk while another one does; lanes see to that by the chunks' numbers.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import xxhash
from torch import Tensor

from megatrain.errors import CheckpointError
from megatrain.layout import pools
from megatrain.layout.host_buffers import PAGE_BYTES, SCRATCH_CHUNK_BYTES, padded
from megatrain.store.drives.drive import Drive, close_all, raw, threads_per_drive, wait

SCRATCH_NAME = "scratch-{}.bin"
"""A rank's file of scratch room in each directory, for the moment between its making and the loss of its
name."""


@dataclass(eq=False, slots=True)
class Place:
    """Room for one piece: chunk `chunks[i]` holds its bytes from `i` chunks on."""

    num_bytes: int
    """Whole pages."""
    chunks: tuple[int, ...]
    sums: list[int] = field(default_factory=list)
    """xxh3-64 of what each chunk holds, once it was written."""


class ScratchFiles:
    """Room on one or several drives for what a run need not find again.

    `take`, `give_back` and `close` are for one thread; others may read and write meanwhile.
    """

    def __init__(self, directories: Sequence[Path], *, rank: int = 0, chunk_bytes: int = 0) -> None:
        """Take nothing yet: files are made with the first place.

        Args:
            directories: The directories, one per drive.
            rank: The rank that makes these files, where each of several makes its own.
            chunk_bytes: The number of bytes of a chunk, whole pages; 0: `SCRATCH_CHUNK_BYTES`, large enough
                for a drive's full rate, and small beside what is saved.
        """
        self.directories = list(directories)
        self.chunk_bytes = chunk_bytes or SCRATCH_CHUNK_BYTES
        assert self.chunk_bytes % PAGE_BYTES == 0
        self._name = SCRATCH_NAME.format(rank)
        self._drives: list[Drive] = []
        weakref.finalize(self, close_all, self._drives)
        self._free: list[int] = []
        self._num_chunks = 0

    @property
    def nbytes(self) -> int:
        """Room taken on all drives."""
        return self._num_chunks * self.chunk_bytes

    def take(self, num_bytes: int) -> Place:
        """Return room for so many bytes, of chunks that are free, or else new.

        Raises:
            CapacityError: A drive is full; nothing was taken.
            OutputError: The files cannot be made, or another run uses them.
        """
        need = pools.scratch_room(num_bytes, self.chunk_bytes) // self.chunk_bytes
        self._make(need - len(self._free))
        chunks = tuple(heapq.heappop(self._free) for _ in range(need))
        return Place(padded(num_bytes), chunks, [-1] * need)

    def give_back(self, place: Place) -> None:
        """Make a place's chunks free; who takes them next waits, by their numbers, for who has used them."""
        for chunk in place.chunks:
            heapq.heappush(self._free, chunk)

    def write(self, place: Place, buffer: Tensor) -> None:
        """Write (num_bytes,) uint8 at a page's address into a place, and wait until the drives have taken it.

        Raises:
            OutputError, CapacityError: A drive does not take it.
        """
        pieces = self._pieces(place, buffer)
        wait(
            drive.submit_write(memory, offset, partial(_sum, place, number))
            for number, (drive, offset, memory) in enumerate(pieces)
        )

    def read(self, place: Place, buffer: Tensor, what: str) -> None:
        """Read what was written into a place; `what` it is, for the message.

        Raises:
            CheckpointError: A drive does not give back what was written.
        """
        pieces = self._pieces(place, buffer)
        wait(
            drive.submit_read(memory, offset, partial(_verify, place, number, drive, offset, what))
            for number, (drive, offset, memory) in enumerate(pieces)
        )

    def close(self) -> None:
        """Let go of the drives: the room is free again."""
        close_all(self._drives)
        self._free, self._num_chunks = [], 0

    def _pieces(self, place: Place, buffer: Tensor) -> list[tuple[Drive, int, memoryview]]:
        memory = raw(buffer)
        assert len(memory) == place.num_bytes
        count, size = len(self._drives), self.chunk_bytes
        return [
            (
                self._drives[chunk % count],
                chunk // count * size,
                memory[number * size : min((number + 1) * size, place.num_bytes)],
            )
            for number, chunk in enumerate(place.chunks)
        ]

    def _make(self, num_chunks: int) -> None:
        """Make more chunks: chunk i is on drive i mod N."""
        if num_chunks <= 0:
            return
        self._open()
        stop, count = self._num_chunks + num_chunks, len(self._drives)
        for number, drive in enumerate(self._drives):
            need = -(-max(0, stop - number) // count) * self.chunk_bytes
            if need > drive.num_bytes:
                drive.grow(need)
        for chunk in range(self._num_chunks, stop):
            heapq.heappush(self._free, chunk)
        self._num_chunks = stop

    def _open(self) -> None:
        if self._drives:
            return
        threads = threads_per_drive(len(self.directories))
        try:
            for directory in self.directories:
                drive = Drive(directory, num_threads=threads, name=self._name)
                self._drives.append(drive)
                drive.allocate(PAGE_BYTES, says_cost=False)  # of the same drive, state says it
                drive.forget_name()
        except BaseException:
            self.close()
            raise


def _sum(place: Place, number: int, memory: memoryview) -> None:
    place.sums[number] = xxhash.xxh3_64_intdigest(memory)


def _verify(place: Place, number: int, drive: Drive, offset: int, what: str, memory: memoryview) -> None:
    if xxhash.xxh3_64_intdigest(memory) != place.sums[number]:
        raise CheckpointError(
            f"{drive.path} is damaged: chunk {number} of {what} (bytes {offset} to {offset + len(memory)}) "
            "is not what was written there; check this drive, and resume from the newest checkpoint with "
            "another one in memory.tiers.nvme, or with memory.boundaries=host, memory.gradients=host and "
            "memory.sums=device"
        )
