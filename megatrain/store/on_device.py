"""State of blocks that is on the device and nowhere else, and how it gets to RAM for as long as it is lent.

Such a block has addresses in RAM all the time. They have memory until an engine has the block on the device,
and then only while somebody reads or writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from megatrain.store.block_state import BlockState
from megatrain.store.planes import Planes

_WORKING = ("working",)


class DeviceHome(Protocol):
    """What has the state of some blocks on the device."""

    def holds(self, block: int) -> bool:
        """Whether a block's state is there, and nowhere else."""

    def bring(self, block: int, planes: Collection[str]) -> None:
        """Copy some planes of a block to their places in RAM, and wait for it."""

    def take(self, block: int, planes: Collection[str]) -> None:
        """Copy some planes of a block from there, and wait for it."""


class BlocksOnDevice:
    """The blocks of a state that an engine has, or will have, on the device alone."""

    def __init__(self, blocks: Collection[int], planes: Planes) -> None:
        """Begin with all of them in RAM.

        Args:
            blocks: The numbers of the blocks.
            planes: The memory of the state in RAM, in which these blocks lie apart.
        """
        self.blocks = frozenset(blocks)
        self.home: DeviceHome | None = None
        """What has them, once there is an optimizer; None: they are in RAM."""
        self._planes = planes

    def holds(self, block: int) -> bool:
        """Whether a block is on the device and nowhere else at this moment."""
        return self.home is not None and self.home.holds(block)

    @property
    def held(self) -> list[int]:
        """The blocks that are there at this moment."""
        return [block for block in sorted(self.blocks) if self.holds(block)]

    @property
    def working_bytes(self) -> int:
        """The bytes of the working weights of these."""
        return sum(self._planes.blocks[block].working.nbytes for block in self.held)

    @contextmanager
    def borrow(self, block: int, *, writes: bool, has_working: bool) -> Iterator[BlockState]:
        """Have a block in RAM until the context ends.

        Args:
            block: The number of the block.
            writes: Whether changes of the caller are kept.
            has_working: Whether the weights are in RAM already, and stay there.
        """
        state = self._planes.blocks[block]
        with self._brought(block, [*state.planes, *(() if has_working else _WORKING)]):
            yield state
            if writes:
                self._home.take(block, [*_WORKING, *state.planes])

    def read_working(self, block: int) -> Tensor:
        """Return a copy of a block's working bytes, (working_bytes,)."""
        with self._brought(block, _WORKING):
            return self._planes.blocks[block].working.clone()

    def bring_working(self) -> None:
        """Make all working weights readable at their addresses, until `drop_working`."""
        for block in self.held:
            self._home.bring(block, _WORKING)

    def keep_working(self, *, has_brought: bool) -> None:
        """Take weights of `bring_working` that the caller has changed, if they were brought."""
        for block in self.held if has_brought else ():
            self._home.take(block, _WORKING)

    def drop_working(self) -> None:
        """Give the memory of `bring_working` back."""
        for block in self.held:
            self._planes.give_back(block, _WORKING)

    @property
    def _home(self) -> DeviceHome:
        assert self.home is not None
        return self.home

    @contextmanager
    def _brought(self, block: int, planes: Collection[str]) -> Iterator[None]:
        try:
            self._home.bring(block, planes)
            yield
        finally:
            self._planes.give_back(block, planes)
