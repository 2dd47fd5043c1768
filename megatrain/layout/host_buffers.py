"""Host buffers through which state passes to its updates and to drives: how many there are, and how large.

One rule, on sizes alone: the plan foretells by it what the store and the engine allocate. Block sizes are in
the order in which RAM keeps blocks, the largest first.
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_GRADIENT_STAGING = 3
"""Gradients on their way from the device to their update: one arrives, one is used, one waits."""
NUM_STATE_STAGING = 3
"""State on its way from the drives to an update and back: one is read, one updated, one written."""
NUM_PAGES = 3
"""Weights on their way from the drives to the device."""
NUM_ACTIVATION_STAGING = 3
"""Saved activations on their way to the drives or back: one is restored while two visits are read ahead."""
SCRATCH_CHUNK_BYTES = 4 << 20
"""Room for saved activations on drives is taken in chunks of this."""
PAGE_BYTES = 4096
"""Direct I/O wants addresses, offsets and sizes in multiples of the logical block, which is at most this."""
PIECE_BYTES = 64 << 20
"""State is written and committed in pieces of at most this."""


def padded(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def state_bytes(num_split: int, num_state: int) -> int:
    """Return the bytes of a block's remainder and moments on a drive: whole pages."""
    return padded(2 * num_split + 8 * num_state)


def largest_first(num_state: Sequence[int]) -> list[int]:
    """Order blocks as RAM keeps them, from the state elements of each.

    The largest come first, because the buffers before the drives are as large as the largest block that
    passes them; blocks of equal size in their order, because the first ones are needed first.
    """
    return sorted(range(len(num_state)), key=lambda block: (-num_state[block], block))


class DriveBuffers:
    """Bytes of the buffers before the drives, for any number of blocks in RAM.

    Each is looked up: a plan for many blocks asks for all pairs of numbers.
    """

    def __init__(self, state: Sequence[int], working: Sequence[int]) -> None:
        """Look at the blocks once.

        Args:
            state: `state_bytes` of each block, the largest block first.
            working: Bytes of its working weights.
        """
        self._state = list(state)
        pages = [padded(nbytes) for nbytes in working]
        self._largest_page = _largest_from(pages)
        self._largest_whole = _largest_from([sum(both) for both in zip(state, pages, strict=True)])
        # at a commit, what lives in RAM passes through the buffers of state, a piece at a time
        self._piece = max((min(PIECE_BYTES, nbytes) for nbytes in (*state, *pages)), default=0)

    def staging_bytes(self, num_working: int, num_state: int) -> int:
        """Return the bytes of the buffers of state.

        Args:
            num_working: So many blocks, the largest, have their weights in RAM.
            num_state: So many of them have all of their state there.
        """
        passing = self._state[num_state:num_working][:1]
        return NUM_STATE_STAGING * max(self._largest_whole[num_working], *passing, self._piece)

    def page_bytes(self, num_working: int) -> int:
        """Return the bytes of the buffers of weights."""
        return NUM_PAGES * self._largest_page[num_working]


def _largest_from(sizes: Sequence[int]) -> list[int]:
    """Return the largest size from each block to the last, and 0 behind it."""
    largest = [0]
    for size in reversed(sizes):
        largest.append(max(size, largest[-1]))
    return largest[::-1]
