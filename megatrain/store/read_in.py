"""Weights that live on drives or the device, and are at their addresses in RAM while somebody reads them."""

from __future__ import annotations

from torch import Tensor

from megatrain.errors import CapacityError
from megatrain.hardware import GIB, host_memory
from megatrain.store.on_device import BlocksOnDevice
from megatrain.store.on_drives import BlocksOnDrives, page_memory
from megatrain.store.planes import Planes
from megatrain.store.ranks import StateRanks, on_each


class WeightsReadIn:
    """Reads the weights of a state, wherever they live: of one block, or of all for a while."""

    def __init__(
        self, planes: Planes, on_drives: BlocksOnDrives, on_device: BlocksOnDevice, ranks: StateRanks
    ) -> None:
        """Begin with what is in RAM alone.

        Args:
            planes: The memory of the state in RAM.
            on_drives: The blocks that are on drives.
            on_device: The blocks that are on the device alone.
            ranks: The ranks that map this memory.
        """
        self._planes, self._on_drives, self._on_device, self._ranks = planes, on_drives, on_device, ranks
        self.are_here = False
        """Whether `bring` has brought them."""

    @property
    def are_whole(self) -> bool:
        """Whether all weights can be read at their addresses."""
        return self.are_here or not (self._on_drives.placement.working_on_drives or self._on_device.held)

    @property
    def nbytes(self) -> int:
        """The bytes of RAM in which weights of drives are."""
        return self._planes.paged.nbytes if self.are_here else 0

    def read(self, block: int) -> Tensor:
        """Return a block's working bytes, (kept_bytes,), to be read at once; in new memory from drives."""
        working = self._planes.blocks[block].working
        if self._on_device.holds(block) and not self.are_here:
            return self._on_device.read_working(block)
        if not self._on_drives.holds_working(block):
            return working
        buffer = self._buffer(block)
        self._on_drives.read(block, buffer, state=False)
        return buffer[: working.numel()]

    def bring(self) -> None:
        """Make weights that live on drives or the device readable at their addresses, until `drop`.

        Several ranks of a node put those of the device to the same addresses, each when it calls this:
        whoever writes there waits until all have returned.

        Raises:
            CapacityError: The machine has no room for them.
        """
        if self.are_whole:
            return
        is_first = self._ranks.local_rank == 0  # what it takes of shared memory is there for the others
        on_device = self._on_device.working_bytes if is_first else 0
        require_room(
            self._planes.paged.nbytes + on_device,
            f"the weights on the {'device' if on_device else 'drives'} take",
            "read them block by block (engine.named_masters), or save a checkpoint",
        )
        self._on_device.bring_working()
        for block in sorted(self._on_drives.placement.working_on_drives):
            self._planes.blocks[block].working.copy_(self.read(block))
        self.are_here = True

    def take(self) -> None:
        """Write back weights of `bring` that the caller has changed; all ranks call it.

        Of several ranks of a node the first one has changed them, and the others bring them anew.
        """
        if self._on_device.blocks:
            if self._in_ranks()[self._first]:
                self._on_device.take_working()
            self._ranks.meet()  # before somebody writes there again
        if self._ranks.local_rank:
            self._planes.paged.drop()
            self.are_here = False
        for block in sorted(self._on_drives.placement.working_on_drives) if self.are_here else ():
            working, buffer = self._planes.blocks[block].working, self._buffer(block)
            buffer[: working.numel()].copy_(working)
            self._on_drives.write(block, buffer, state=False)

    def drop(self) -> None:
        """Give the memory of `bring` back, since weights are about to change; all ranks call it."""
        found = self._in_ranks() if self._on_device.blocks else [False]
        if any(found):  # which all know now, and have done with the same addresses
            if self._ranks.local_rank == 0 and any(self._on_node(found)):
                self._on_device.drop_working()
            self._ranks.meet()
        if self.are_here:
            self._planes.paged.drop()
            self.are_here = False

    def are_on_node(self) -> bool:
        """Whether any rank of the node has brought those of the device; all ranks call it, and meet here."""
        return bool(self._on_device.blocks) and any(self._on_node(self._in_ranks()))

    def _in_ranks(self) -> list[bool]:
        """Return of each rank whether it has brought them; all ranks call it."""
        return on_each(self._ranks, self.are_here)

    @property
    def _first(self) -> int:
        """The number of the first rank of the node."""
        return self._ranks.node * self._ranks.local_size

    def _on_node(self, found: list[bool]) -> list[bool]:
        return found[self._first : self._first + self._ranks.local_size]

    def _buffer(self, block: int) -> Tensor:
        image = self._on_drives.images[block]
        return page_memory(image.num_bytes - image.working_start)


def require_room(nbytes: int, what: str, remedy: str) -> None:
    """Refuse to take more host memory than there is.

    Raises:
        CapacityError: There is less.
    """
    room = host_memory().available_bytes
    if nbytes > room:
        raise CapacityError(
            f"host memory: {what} {nbytes / GIB:.2f} GiB, but {room / GIB:.2f} GiB are left; {remedy}"
        )
