"""Extents of state, and the chunks of them: chunk i of a store is on drive i mod N, in two places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.layout.host_buffers import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of state with a place on the drives."""

    name: str
    """For messages."""
    num_bytes: int
    """Whole pages."""
    turn: int = 0
    """Which of several ranks moves its first chunk, as of `drive_chunks.first_turn`; the next the next."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an extent that is moved at once, and has a checksum."""

    drive: int
    """Number of the drive on which it is."""
    start: int
    """Byte in the extent."""
    stop: int
    """Byte after it."""
    offsets: tuple[int, int]
    """Bytes in the drive's file, of the two copies."""
    number: int
    """In the store."""
    turn: int
    """Which rank moves it, as of `drive_chunks.is_own`."""


def lay_out(
    extents: Sequence[Extent], num_drives: int, chunk_bytes: int
) -> tuple[list[list[Chunk]], list[int]]:
    """Cut extents into chunks, and give each chunk two places; also returns the bytes of each drive."""
    cursors = [0] * num_drives
    chunks: list[list[Chunk]] = []
    number = 0
    for extent in extents:
        assert extent.num_bytes % PAGE_BYTES == 0, extent
        pieces: list[Chunk] = []
        for start in range(0, extent.num_bytes, chunk_bytes):
            stop = min(start + chunk_bytes, extent.num_bytes)
            drive, size = number % num_drives, stop - start
            places = cursors[drive], cursors[drive] + size
            pieces.append(Chunk(drive, start, stop, places, number, extent.turn + len(pieces)))
            cursors[drive] += 2 * size
            number += 1
        chunks.append(pieces)
    return chunks, cursors
