"""What each rank moves of a block's image, by arithmetic and chunk by chunk."""

from __future__ import annotations

import random

from megatrain.layout.drive_chunks import CHUNK_BYTES, is_own, own_bytes


def test_bytes_of_a_rank_are_those_of_its_chunks() -> None:
    draw = random.Random(24)
    for _ in range(500):
        num_ranks, turn = draw.randint(1, 9), draw.randint(0, 40)
        nbytes = draw.choice((0, 1, CHUNK_BYTES, draw.randint(0, 12) * CHUNK_BYTES, draw.randint(0, 1 << 27)))
        sizes = [min(CHUNK_BYTES, nbytes - start) for start in range(0, nbytes, CHUNK_BYTES)]
        for rank in range(num_ranks):
            own = [size for number, size in enumerate(sizes) if is_own(turn + number, rank, num_ranks)]
            assert own_bytes(nbytes, turn, rank, num_ranks) == sum(own), (nbytes, turn, rank, num_ranks)


def test_no_chunk_is_looked_at_to_count_bytes() -> None:
    """A search asks it of each block of each choice: with terabytes on drives, that was most of its time."""
    assert own_bytes(1 << 100, 3, 2, 4) == 1 << 98
