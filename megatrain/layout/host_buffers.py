"""Host buffers through which bytes pass to the device, to updates and to drives: how many, in what units."""

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
LEAST_OFFLOADED_BYTES = 16 * 1024
"""Saved tensors in smaller storages stay on the device under `offload`, and so do smaller boundaries:
starting a copy costs more time than their memory is worth."""
OFFLOAD_ALIGNMENT = 512
"""The alignment of a saved tensor in host memory, in bytes; torch's allocations on CUDA have the same."""
SCRATCH_CHUNK_BYTES = 4 << 20
"""Room for saved activations on drives is taken in chunks of this."""
PAGE_BYTES = 4096
"""Direct I/O wants addresses, offsets and sizes in multiples of the logical block, which is at most this."""
PIECE_BYTES = 64 << 20
"""State is written and committed in pieces of at most this."""


def padded(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def pieces_of(num_bytes: int) -> list[int]:
    """Cut a part of a block's image into the bytes of its pieces."""
    return [min(PIECE_BYTES, num_bytes - start) for start in range(0, num_bytes, PIECE_BYTES)]


def largest_first(num_state: Sequence[int]) -> list[int]:
    """Order blocks as RAM keeps them, from the state elements of each.

    The largest come first, because the buffers before the drives are as large as the largest block that
    passes them; blocks of equal size in their order, because the first ones are needed first.
    """
    return sorted(range(len(num_state)), key=lambda block: (-num_state[block], block))
