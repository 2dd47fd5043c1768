"""What a store knows of its chunks and extents: checksums, and the newest and committed copies.

Several ranks map one table, in which each notes what it has written: so all of them read what any has
written, and the first one commits it for all. It begins as zeros, whoever maps it first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor


class Tables:
    """Checksums by copy and chunk, and copies by extent."""

    def __init__(self, memory: Tensor, num_chunks: int, num_extents: int) -> None:
        """Use `table_bytes` of memory, (bytes,) uint8 zeros."""
        flat = memory.numpy()
        edge = 16 * num_chunks
        self._sums = flat[:edge].view(np.uint64).reshape(2, num_chunks)
        self._copies = flat[edge:].reshape(2, num_extents)
        """One more than the copy; the newest, then the committed ones."""

    def sum(self, copy: int, chunk: int) -> int:
        """Return the xxh3-64 of a chunk."""
        return int(self._sums[copy, chunk])

    def set_sum(self, copy: int, chunk: int, value: int) -> None:
        """Note that of a chunk that is about to be written."""
        self._sums[copy, chunk] = value

    def current(self, extent: int) -> int:
        """Return the copy of an extent that holds what was written last; -1: none."""
        return int(self._copies[0, extent]) - 1

    def target(self, extent: int) -> int:
        """Return the copy of an extent that holds no committed state: what is written goes there."""
        return 1 if self._copies[1, extent] == 1 else 0

    def settle(self, extent: int) -> None:
        """Note that a write to the target of an extent has ended well."""
        self._copies[0, extent] = self.target(extent) + 1

    def newest(self) -> list[int]:
        """Return `current` of all extents."""
        return [int(copy) - 1 for copy in self._copies[0]]

    def commit(self, copies: Sequence[int]) -> None:
        """Note that these copies of all extents are the committed ones."""
        self._copies[1] = np.asarray(copies, dtype=np.int64) + 1

    def take(self, copies: Sequence[int]) -> None:
        """Go on from these copies of all extents, which are committed."""
        self.commit(copies)
        self._copies[0] = self._copies[1]


def table_bytes(num_chunks: int, num_extents: int) -> int:
    """Return the memory that tables take."""
    return 16 * num_chunks + 2 * num_extents
