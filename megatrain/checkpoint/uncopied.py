"""Which blocks a checkpoint still has to copy, told to all processes that change the state of a node.

One process writes the checkpoint, and several change the state, each a share of every block. So whoever is
about to change a block looks here first, and says which one it wants: the process that copies may have no
share of it, and would come to it last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

LOOK_S = 0.0005
"""How often a process looks at what another one has said, while it has to."""


class Uncopied:
    """The blocks that are still to be copied."""

    def __init__(
        self, cells: npt.NDArray[np.int64], num_blocks: int, place: int, look: Callable[[], object]
    ) -> None:
        """Begin with none.

        Args:
            cells: (num_blocks + the number of processes,) zeros that all of them map.
            num_blocks: The number of blocks.
            place: The place of this process among them; the first one copies.
            look: The function that raises where the process that copies is gone.
        """
        self._held, self._wanted = cells[:num_blocks], cells[num_blocks:]  # the latter: a number and 1
        self._place, self._look = place, look

    def hold(self, blocks: Iterable[int]) -> None:
        """Let nobody change some blocks; the process that copies calls it."""
        for block in blocks:
            self._held[block] = 1

    def let_go(self, block: int) -> None:
        """Let a block change; the process that copies calls it."""
        self._held[block] = 0

    def let_all_go(self) -> None:
        """Let every block change: nothing is copied any more; the process that copies calls it."""
        self._held[:] = 0

    def wait(self, block: int) -> None:
        """Return once a block may change; the processes that do not copy call it, in any thread.

        Raises:
            Exception: What `look` raises.
        """
        try:
            while self._held[block]:
                self._wanted[self._place] = block + 1
                self._look()
                time.sleep(LOOK_S)
        finally:
            self._wanted[self._place] = 0

    def wanted(self) -> list[int]:
        """Return the blocks for which processes wait; the process that copies calls it."""
        return [number - 1 for number in self._wanted.tolist() if number]
