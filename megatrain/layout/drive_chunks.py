"""The chunks in which state lies on drives, and which of several ranks moves which of them.

Ranks take the chunks of a block's image in turn, whatever their shares of it are: a chunk has one checksum,
so it is written as a whole. Which rank is first depends on the block: small blocks are shared out too.
"""

from __future__ import annotations

CHUNK_BYTES = 8 << 20
"""The size of one transfer. 4 to 16 MiB were equally fast, and fewer calls take less CPU."""


def first_turn(block: int, start: int) -> int:
    """Return whose turn the chunk at byte `start` of a part of a block's image is, counted without end.

    Args:
        block: The number of the block.
        start: The byte of that part at which the chunk begins, a multiple of `CHUNK_BYTES`.
    """
    return block + start // CHUNK_BYTES


def is_own(turn: int, rank: int, num_ranks: int) -> bool:
    """Return whether a chunk is one that this rank moves."""
    return turn % num_ranks == rank


def own_bytes(num_bytes: int, turn: int, rank: int, num_ranks: int) -> int:
    """Return the bytes that one rank moves of so many, whose first chunk has this turn."""
    count = -(-num_bytes // CHUNK_BYTES)
    first = (rank - turn) % num_ranks
    if first >= count:
        return 0
    own = -(-(count - first) // num_ranks) * CHUNK_BYTES
    ends = is_own(turn + count - 1, rank, num_ranks)  # the last chunk may be a part of one
    return own - (count * CHUNK_BYTES - num_bytes) if ends else own
