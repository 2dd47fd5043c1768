"""State of blocks that is on the device and nowhere else, and how it gets to RAM for as long as it is lent.

Such a block has addresses in RAM all the time. They have memory until an engine has the block on the device,
and then only while somebody reads or writes it. Of several ranks each has all weights on its device, and of
the rest its share, which it copies by itself; the first rank of a node gives the memory back for all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from megatrain.store.planes import Planes
from megatrain.store.ranks import StateRanks

_WORKING = ("working",)


class DeviceHome(Protocol):
    """What has the state of some blocks on a rank's device: all weights, and its share of other planes."""

    def holds(self, block: int) -> bool:
        """Whether a block's state is there, and nowhere else."""

    def bring(self, block: int, planes: Collection[str]) -> None:
        """Copy some planes of a block to their places in RAM, and wait for it."""

    def take(self, block: int, planes: Collection[str]) -> None:
        """Copy some planes of a block from there, and wait for it."""

    def read_working(self, block: int) -> Tensor:
        """Return a copy of a block's working bytes, (working_bytes,)."""


class BlocksOnDevice:
    """The blocks of a state that an engine has, or will have, on the device alone."""

    def __init__(self, blocks: Collection[int], planes: Planes, ranks: StateRanks) -> None:
        """Begin with all of them in RAM.

        Args:
            blocks: The numbers of the blocks.
            planes: The memory of the state in RAM, in which these blocks lie apart.
            ranks: The ranks that map this memory, each with a device.
        """
        self.blocks = frozenset(blocks)
        self.home: DeviceHome | None = None
        """What has them, once there is an optimizer; None: they are in RAM."""
        self._planes = planes
        self._ranks = ranks
        self._keeps_working = False
        """The weights of what `bring` has brought were in RAM before, and stay there."""

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

    def bring(self, block: int, *, has_working: bool) -> None:
        """Have a block in RAM until `give_back`; all ranks of the node call it.

        Args:
            block: The number of the block.
            has_working: Whether a rank of the node has the weights in RAM already.
        """
        self._keeps_working = has_working
        brings_working = self._ranks.local_rank == 0 and not has_working
        self._home.bring(block, [*self._names(block), *(_WORKING if brings_working else ())])
        self._ranks.meet()

    def take(self, block: int) -> None:
        """Keep what the first rank of the node has written to a block of `bring`; all ranks of it call it."""
        self._ranks.meet()
        self._home.take(block, [*_WORKING, *self._names(block)])

    def give_back(self, block: int, *, has_working: bool) -> None:
        """Give back what `bring` has taken; the first rank of a node does it, when all have read it."""
        keeps_working = has_working or self._keeps_working
        self._planes.give_back(block, [*self._names(block), *(() if keeps_working else _WORKING)])

    def read_working(self, block: int) -> Tensor:
        """Return a copy of a block's working bytes, (working_bytes,)."""
        return self._home.read_working(block)

    def bring_working(self) -> None:
        """Make all working weights readable at their addresses, until `drop_working`."""
        for block in self.held:
            self._home.bring(block, _WORKING)

    def take_working(self) -> None:
        """Take weights of `bring_working` that the caller has changed."""
        for block in self.held:
            self._home.take(block, _WORKING)

    def drop_working(self) -> None:
        """Give the memory of `bring_working` back."""
        for block in self.held:
            self._planes.give_back(block, _WORKING)

    def _names(self, block: int) -> list[str]:
        """Return the names of a block's planes beside its weights."""
        return [*self._planes.blocks[block].planes]

    @property
    def _home(self) -> DeviceHome:
        assert self.home is not None
        return self.home
