"""Host state of which a part is on drives: the same accessors, and no caller knows where a plane lives.

What must stay true: peak host memory while a model is loaded is that of the placement plus the blocks that
are half loaded, which is one where the files hold block after block; a plane on the drives is never read as
if it were here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.runs import SumRoom
from megatrain.errors import CapacityError, ConfigError
from megatrain.hardware import GIB, host_memory
from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.host_buffers import NUM_PAGES, NUM_STATE_STAGING
from megatrain.store.arena import Arena
from megatrain.store.on_drives import BlocksOnDrives, Image
from megatrain.store.placement import Tiers
from megatrain.store.ranks import StateRanks
from megatrain.store.state import BlockState, HostState, Precision, write_value


class BlockStateOnDrives(BlockState):
    """A block whose remainder and optimizer state are on drives: `HostState.borrow` brings them."""

    def __init__(self, layout: BlockLayout, working: Tensor) -> None:
        """Leave out the planes that are not here: asking for one is a mistake that must show."""
        super().__init__(layout, working)
        for name in ("remainder", "planes"):
            self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Tensor:
        raise AssertionError(f"{name} of the block is on the drives; use HostState.borrow")


class _Filling(NamedTuple):
    """A block on the drives whose first values arrive."""

    block: BlockState
    buffer: Tensor
    left: int
    """Elements to come."""


class TieredState(HostState):
    """All planes of all blocks, in RAM as far as the placement says so."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        precision: Precision,
        tiers: Tiers,
        optimizer: Optimizer,
        *,
        sum_room: SumRoom,
        ranks: StateRanks | None = None,
    ) -> None:
        """Decide where planes live, open the drives, then allocate.

        Args:
            layouts: The layouts of the blocks.
            precision: The precision in which weights are kept.
            tiers: The tiers: what RAM may hold, and the drives.
            optimizer: The optimizer whose state it will be.
            sum_room: The room for partial sums that are kept between rounds, as in `place`.
            ranks: The ranks that keep one state, in RAM and on the drives; None: this one is alone.

        Raises:
            MegatrainError: RAM or a drive does not hold its part; nothing was allocated.
            CheckpointError: `tiers.resumes`, and the drives hold no state of this model.
        """
        self.on_drives = BlocksOnDrives(layouts, tiers, optimizer, sum_room=sum_room, ranks=ranks)
        room = host_memory().available_bytes
        need = sum(self.on_drives.placement.ram_bytes.values())
        if need > room:
            raise CapacityError(
                f"host memory: the part of the state that stays in RAM takes {need / GIB:.2f} GiB, but "
                f"{room / GIB:.2f} GiB are left; lower memory.tiers.ram, so that more goes to the drives"
            )
        self._filling: dict[int, _Filling] = {}
        self._is_whole = False
        self._planned = optimizer
        self._has_restored_planes = False
        """The first optimizer goes on with what `_restore` has read."""
        self.changed: set[tuple[int, bool]] = set()
        """(block, is it the working weights) of what lives in RAM and differs from the newest image."""
        self.is_resumed = tiers.resumes
        self.record = self.on_drives.open()
        """What was committed, if that is what this state goes on from; the first rank knows it."""
        try:
            super().__init__(layouts, precision, shared=None if ranks is None else ranks.shared_memory)
            if tiers.resumes:
                self._restore()
            else:
                self.mark_changed()
        except BaseException:
            self.on_drives.store.close()
            raise

    def is_for(
        self,
        layouts: Sequence[BlockLayout],
        precision: Precision,
        tiers: Tiers | None,
        optimizer: Optimizer,
    ) -> bool:
        """Whether this is the state that these settings ask for."""
        asked = None if tiers is None else tiers.asked
        mine = (list(self.layouts), self.precision, self.on_drives.tiers.asked, self._planned)
        return mine == (list(layouts), precision, asked, optimizer)

    # -- where things are -----------------------------------------------------------------------------------

    def allocate_buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the buffers for state on its way to updates, and those for weights on their way out."""
        placed = self.on_drives.placement.ram_bytes
        state, weights = (
            self._allocate(name, [placed[name] // count] * count)
            for name, count in (("staging of state", NUM_STATE_STAGING), ("staging of weights", NUM_PAGES))
        )
        return state, weights

    def allocate_planes(self, optimizer: Optimizer) -> None:
        """Allocate the planes of the blocks in RAM, all zero; those of the others are on the drives already.

        Raises:
            ConfigError: There is room for those of another optimizer there.
        """
        kept = self._planned
        if optimizer != kept:
            raise ConfigError(
                f"the optimizer's state is to be {optimizer.state}, but state on drives (memory.tiers.nvme) "
                f"is kept in {kept.state}, of {kept.name}; use state={kept.state!r}, or no drives"
            )
        if self._has_restored_planes:
            self._has_restored_planes = False
            return
        super().allocate_planes(optimizer)

    def allocate_gradients(self, blocks: Collection[int]) -> None:
        """Allocate the gradient plane if it is not there, and if the placement has counted on it.

        Raises:
            CapacityError: The placement has not counted on it.
        """
        if not self.on_drives.placement.keeps_gradients:
            raise CapacityError(
                "host memory: the split between RAM and drives counts on optim.updates=immediate and one "
                "round per step, but gradients are to be kept; use keeps_gradients=True"
            )
        super().allocate_gradients(blocks)

    @property
    def plane_bytes(self) -> dict[str, int]:
        """Bytes in RAM of each plane and buffer allocated so far."""
        return super().plane_bytes | ({"weights read in": self._paged.nbytes} if self._is_whole else {})

    def mark_changed(self) -> None:
        """Take note that everything in RAM may differ from its image."""
        self.changed = {
            (block, is_working)
            for block in range(len(self.layouts))
            for is_working in (False, True)
            if not (self.on_drives.holds_working if is_working else self.on_drives.holds_state)(block)
        }

    def mark_updated(self, block: int) -> None:
        """Take note that a block was updated."""
        if not self.on_drives.holds_state(block):
            self.changed.add((block, False))
        if not self.on_drives.holds_working(block):
            self.changed.add((block, True))

    def planes_in_ram(self, block: int) -> dict[str, list[Tensor]]:
        """Return the parts of each plane of a block's image that live in RAM, in the image's order.

        Of the optimizer's planes only once there is one.
        """
        state = self.blocks[block]
        planes = {} if self.on_drives.holds_working(block) else {"working": [state.working]}
        if not self.on_drives.holds_state(block):
            planes |= {name: self._kept_of(block, state, name) for name in state.updated_planes}
        return planes

    # -- reading and writing --------------------------------------------------------------------------------

    @contextmanager
    def borrow(self, block: int, *, writes: bool = False) -> Iterator[BlockState]:
        """Lend a block with all its planes; those on the drives come through memory of their own."""
        away = self.on_drives
        if not away.holds_state(block):
            yield self.blocks[block]
            self.changed |= {(block, False), (block, True)} if writes else set()
            return
        lent, buffer = self._lend(block)
        both = away.holds_working(block)
        away.read(block, buffer, working=both)
        self._take_in(block, lent, buffer)
        yield lent
        if writes:
            self._take_out(block, lent, buffer)
            away.write(block, buffer, working=both)
            if both and self._is_whole:
                self.blocks[block].working.copy_(lent.working)
            self.changed |= set() if both else {(block, True)}

    def lend_working(self, block: int) -> Tensor:
        """Return a block's working bytes, (working_bytes,), in new memory if they are on the drives."""
        working = self.blocks[block].working
        if not self.on_drives.holds_working(block):
            return working
        buffer = self._buffer(block, only_working=True)
        self.on_drives.read(block, buffer, state=False)
        return buffer[: working.numel()]

    def put(self, name: str, value: Tensor, region: tuple[int | slice, ...] = ()) -> None:
        """Write `value` into `region` of a parameter; a block on the drives leaves once it is complete."""
        number = self.number_of(name)
        if not self.on_drives.holds_state(number):
            super().put(name, value, region)
            self.changed |= {(number, False), (number, True)}
            return
        if number not in self._filling and self._is_filled(number):
            with self.borrow(number, writes=True) as block:
                write_value(block, block.entries[name], value, region)
            return
        if number not in self._filling:
            total = sum(entry.numel for entry in self.layouts[number].entries)
            self._filling[number] = _Filling(*self._lend(number), total)
        block, buffer, left = self._filling[number]
        write_value(block, block.entries[name], value, region)
        self._filling[number] = _Filling(block, buffer, left - value.numel())
        if left - value.numel() <= 0:
            del self._filling[number]
            self._take_out(number, block, buffer)
            self.on_drives.write(number, buffer, working=self.on_drives.holds_working(number))

    @property
    def has_working(self) -> bool:
        """Whether all weights can be read at their addresses."""
        return self._is_whole

    def bring_working(self) -> None:
        """Make the weights that live on the drives readable at their addresses, until `drop_working`.

        Raises:
            CapacityError: The machine has no room for them.
        """
        if self._is_whole:
            return
        room = host_memory().available_bytes
        if self._paged.nbytes > room:
            raise CapacityError(
                f"host memory: the weights on the drives take {self._paged.nbytes / GIB:.2f} GiB, but "
                f"{room / GIB:.2f} GiB are left; read them block by block (engine.named_masters), or save a "
                "checkpoint"
            )
        for block in sorted(self.on_drives.placement.working_on_drives):
            self.blocks[block].working.copy_(self.lend_working(block))
        self._is_whole = True

    def keep_working(self) -> None:
        """Write back weights of `bring_working` that the caller has changed.

        Of several ranks of a node the first one has changed them, and the others bring them anew.
        """
        if self.on_drives.rank:
            self.drop_working()
        for block in sorted(self.on_drives.placement.working_on_drives) if self._is_whole else ():
            buffer = self._buffer(block, only_working=True)
            working = self.blocks[block].working
            buffer[: working.numel()].copy_(working)
            self.on_drives.write(block, buffer, state=False)

    def drop_working(self) -> None:
        """Give the memory of `bring_working` back: the weights are about to change on the drives."""
        if self._is_whole:
            self._paged.drop()
            self._is_whole = False

    # -- inside ---------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Read what lives in RAM from its images; a block that was never written has nothing to restore.

        Of several ranks of a node the first one reads, for all of them.
        """
        self.allocate_planes(self._planned)
        for number in range(len(self.layouts)) if self.on_drives.rank == 0 else ():
            planes = self.planes_in_ram(number)
            if not planes:
                continue
            buffer = self._buffer(number)
            self.on_drives.read(number, buffer)
            image = self.on_drives.images[number]
            found = {**image.planes(buffer), "working": image.working(buffer)}
            for name, parts in planes.items():
                start = 0
                for part in parts:
                    part.copy_(found[name][start : start + part.numel()])
                    start += part.numel()
        self.on_drives.meet("orders")
        self._has_restored_planes = True

    def _lend(self, number: int) -> tuple[BlockState, Tensor]:
        """Make a block whose planes are views of a new buffer, which is its image."""
        buffer = self._buffer(number)
        return self._view(number, self.on_drives.images[number], buffer), buffer

    def _view(self, number: int, image: Image, memory: Tensor) -> BlockState:
        """View a block in memory of an image, but for working weights that live in RAM."""
        state, is_there = self.blocks[number], self.on_drives.holds_working(number)
        lent = BlockState(state.layout, image.working(memory) if is_there else state.working)
        for name, plane in image.planes(memory).items():
            lent.set_plane(name, plane)
        lent.gradient, lent.accumulator = state.gradient, state.accumulator
        return lent

    def _kept_of(self, block: int, state: BlockState, plane: str) -> list[Tensor]:
        """View what this node keeps of a plane of a block."""
        found = state.find_plane(plane)
        assert found is not None
        return [found]

    def _take_in(self, block: int, lent: BlockState, buffer: Tensor) -> None:
        """Bring what was read of an image to a block of `_lend`: its planes are views of the same memory."""

    def _take_out(self, block: int, lent: BlockState, buffer: Tensor) -> None:
        """Bring such a block to its image, which is written next."""

    def _buffer(self, number: int, *, only_working: bool = False) -> Tensor:
        image = self.on_drives.images[number]
        num_bytes = image.num_bytes - (image.working_start if only_working else 0)
        return Arena(num_bytes).view(torch.uint8, 0, num_bytes)

    def _is_filled(self, number: int) -> bool:
        return all(
            self.on_drives.store.has(piece.extent)
            for piece in self.on_drives.images[number].of(
                state=True, working=self.on_drives.holds_working(number)
            )
        )

    def _make_blocks(self) -> list[BlockState]:
        """Allocate the working plane in RAM, and addresses without memory for the rest."""
        gone = [self.on_drives.holds_working(block) for block in range(len(self.layouts))]
        sizes = [pools.working_plane(layout.sizes) for layout in self.layouts]
        here = self._allocate("working", [0 if g else n for g, n in zip(gone, sizes, strict=True)])
        there = self._allocate("paged", [n if g else 0 for g, n in zip(gone, sizes, strict=True)])
        self._paged = self._arenas.pop("paged")
        self._is_whole = not any(gone)
        return [
            (BlockStateOnDrives if self.on_drives.holds_state(block) else BlockState)(
                layout, (there if gone[block] else here)[block][: layout.working_bytes]
            )
            for block, layout in enumerate(self.layouts)
        ]

    def _is_here(self, plane: str, block: int) -> bool:
        return plane not in self.on_drives.planes or not self.on_drives.holds_state(block)
