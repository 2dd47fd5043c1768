"""The state of a model on the host: all planes of all blocks, and the one way to read and write a value.

Where a plane of a block is, three facts say: the `Placement`, whether it is in RAM or in the block's image on
drives; `NodeParts`, what of it this node keeps; and the arena that holds it, which all ranks of a node map. A
single process without drives has everything in RAM, whole, and is no case of its own.

What must stay true: peak host memory while a model is loaded is that of the placement plus half loaded
blocks, which is one where files hold block after block; no plane on drives is read as if it were here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.runs import SumRoom
from megatrain.errors import ConfigError
from megatrain.hardware import host_memory
from megatrain.layout.blocks import BlockLayout, Entry
from megatrain.store.arena import Arena
from megatrain.store.block_state import (
    BlockState,
    decoded,
    joined_rows,
    part_of_region,
    view_entry,
    write_value,
)
from megatrain.store.nodes import NodeParts
from megatrain.store.on_device import BlocksOnDevice
from megatrain.store.on_drives import BlocksOnDrives, page_memory
from megatrain.store.placement import Placement, Tiers
from megatrain.store.planes import Planes
from megatrain.store.precision import Precision
from megatrain.store.ranks import StateRanks
from megatrain.store.read_in import WeightsReadIn, require_room

_log = logging.getLogger(__name__)


class HostState:
    """All planes of all blocks. One arena per plane, of exact size, allocated when it is first needed."""

    limit: int | None = None
    """The bytes that all planes may take; None: what the machine has."""
    make_planes: Callable[[Sequence[BlockLayout], Placement, StateRanks, Collection[int]], Planes] = Planes
    """Allocates the memory of planes in RAM."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        precision: Precision,
        *,
        tiers: Tiers | None,
        optimizer: Optimizer,
        sum_room: SumRoom,
        ranks: StateRanks,
        on_device: Collection[int] = (),
    ) -> None:
        """Decide where planes live, open the drives, then allocate the working plane and the remainder.

        Args:
            layouts: The layouts of the blocks.
            precision: The way in which weights are kept.
            tiers: The limit of RAM, and the drives; None: everything is in RAM.
            optimizer: The optimizer whose state it will be.
            sum_room: The room for partial sums that the placement counts on, as `place` takes it.
            ranks: The ranks that keep one state, in RAM and on the drives.
            on_device: The blocks whose state an optimizer will have on the device, and nowhere else.

        Raises:
            MegatrainError: RAM or a drive does not hold its part; nothing was allocated.
            CheckpointError: `tiers.resumes`, and the drives hold no state of this model.
        """
        self.layouts = tuple(layouts)
        self.precision = precision
        self.digests: dict[str, bytes] = {}
        """Digests of weights that an engine has given back, by name; see `digests`."""
        self.changed: set[tuple[int, bool]] = set()
        """(block, is it the working weights) of what lives in RAM and differs from the newest image."""
        self.is_resumed = tiers is not None and tiers.resumes
        self._planned = optimizer
        self._ranks = ranks
        self.parts = NodeParts(layouts, ranks, optimizer)
        """What each of several nodes keeps of a block."""
        self._filling: dict[int, tuple[BlockState, Tensor | None]] = {}
        """Blocks on the drives whose first values arrive, each with the buffer of its image."""
        self._num_lent = [0] * len(layouts)  # of blocks that are brought for it
        self._num_filled = [0] * len(layouts)  # elements that have been put there, until it is complete
        self._has_restored_planes = False
        """The first optimizer goes on with what `_restore` has read."""
        self.on_drives = BlocksOnDrives(layouts, tiers, optimizer, sum_room=sum_room, ranks=ranks)
        require_room(
            sum(self.on_drives.placement.ram_bytes.values()),
            "the part of the state that stays in RAM takes",
            "lower memory.tiers.ram, so that more goes to the drives",
        )
        if self.has_drives:
            _log.debug(
                "%s; a step reads %d bytes and writes %d for its updates, a first commit %d more",
                self.on_drives.placement.describe(len(self.layouts)),
                *self.on_drives.bytes_per_step(),
            )
        self.record = self.on_drives.open()
        """What was committed, if that is what this state goes on from; the first rank knows it."""
        try:
            self.planes = self.make_planes(self.layouts, self.on_drives.placement, ranks, on_device)
            self.on_device = BlocksOnDevice(on_device, self.planes, ranks)
            self.weights = WeightsReadIn(self.planes, self.on_drives, self.on_device, ranks)
            self.blocks = self.planes.blocks
            self._places: dict[str, list[tuple[int, Entry]]] = {}
            for number, layout in enumerate(layouts):
                for entry in layout.entries:
                    self._places.setdefault(entry.name, []).append((number, entry))
            if precision is Precision.BF16:
                self.planes.allocate_remainder()
            away = self.on_drives.placement.state_on_drives if self.parts.are_several else ()
            most = max((self.on_drives.images[block].whole.num_bytes for block in away), default=0)
            self._lent = Arena(most, ranks.shared_memory(most) if most else None)
            """Memory in which a block on drives is whole while all ranks of the node borrow it."""
            if self.is_resumed:
                self._restore()
            else:
                self.mark_changed()
        except BaseException:
            self.on_drives.store.close()
            raise

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None: a copied model's parameters are its own, no views of this memory."""
        return type(None), ()

    # -- where things are -----------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose planes are allocated, once they are."""
        return self.planes.optimizer

    @property
    def has_drives(self) -> bool:
        """Whether there are drives, to which at least a commit writes."""
        return bool(self.on_drives.images)

    @property
    def is_parted(self) -> bool:
        """Whether several nodes keep it, each its part: planes have holes then, which `borrow` fills."""
        return self.parts.are_several

    @property
    def is_read_by_all(self) -> bool:
        """Whether all ranks have to `borrow` what one of them reads: a part of it is theirs alone."""
        return self.is_parted or bool(self.on_device.held)

    def is_for(
        self,
        layouts: Sequence[BlockLayout],
        precision: Precision,
        tiers: Tiers | None,
        optimizer: Optimizer,
        on_device: Collection[int] = (),
    ) -> bool:
        """Whether this is the state that these settings ask for.

        Raises:
            ConfigError: It is not, and no other can take its place: it is on drives, or on several nodes.
        """
        same_place = self.on_device.blocks == frozenset(on_device) and self.precision is precision
        is_same = same_place and list(self.layouts) == list(layouts)
        kept, asked = (None if each is None else each.asked for each in (self.on_drives.tiers, tiers))
        if self.has_drives and not (is_same and kept == asked and optimizer == self._planned):
            raise ConfigError(
                "the model was loaded with its state on drives for other settings; give megatrain.load and "
                "attach the same tiers, precision, optimizer and fragments, and freeze parameters after "
                "attach"
            )
        if self.is_parted and not (is_same and self.parts.has_scales is optimizer.has_scales):
            raise ConfigError(
                "the model was loaded for several nodes with other settings; give megatrain.load and attach "
                "the same precision, fragments, optimizer_state, and with mirror_resident=False the same "
                "resident_layers and outer_resident"
            )
        return is_same and kept == asked

    def places(self, name: str) -> Sequence[tuple[int, Entry]]:
        """Return the block, by number, and the entry of each part of a parameter, by its rows."""
        return self._places[name]

    def number_of(self, name: str) -> int:
        """Return the number of a parameter's block, or of the first of its blocks."""
        return self._places[name][0][0]

    def has(self, name: str) -> bool:
        """Whether a parameter of this name is here."""
        return name in self._places

    def names(self) -> Iterator[str]:
        """Yield the names of all parameters, block by block."""
        return iter(self._places)

    def weight(self, name: str) -> Tensor:
        """View a parameter's working weight at its address, whole: its parts lie one after the other."""
        parts = [self.blocks[number].weight(entry) for number, entry in self._places[name]]
        return joined_rows(parts)

    def arena(self, plane: str) -> Arena | None:
        """Return a plane's arena, to lock its pages; None of one that is here in part: locking takes all."""
        return None if plane in self._parted else self.planes.arenas.get(plane)

    @property
    def plane_bytes(self) -> dict[str, int]:
        """Bytes in this node's RAM of each plane allocated so far, and of this rank's own buffers."""
        found = {plane: arena.nbytes for plane, arena in self.planes.arenas.items()}
        for plane in self._parted & found.keys():
            here = (block for block in range(len(self.blocks)) if block not in self.on_device.blocks)
            parts = (self.parts.own(block, self.blocks[block], [plane]) for block in here)
            found[plane] = sum(part.nbytes for own in parts for part in own)
        return found | ({"weights read in": self.weights.nbytes} if self.weights.are_here else {})

    @property
    def host_bytes(self) -> int:
        """Bytes of all of these."""
        return sum(self.plane_bytes.values())

    @property
    def bytes_left(self) -> int:
        """Bytes that planes may still take, of the limit and of what the machine has."""
        available = host_memory().available_bytes
        return available if self.limit is None else min(available, self.limit - self.host_bytes)

    def allocate_planes(self, optimizer: Optimizer) -> None:
        """Allocate the optimizer's planes of the blocks in RAM, all zero; the drives have those of others.

        Raises:
            ConfigError: There is room for those of another optimizer there.
        """
        kept = self._planned
        if self.has_drives and optimizer != kept:
            raise ConfigError(
                f"the optimizer's state is to be {optimizer.state}, but state on drives (memory.tiers.nvme) "
                f"is kept in {kept.state}, of {kept.name}; use state={kept.state!r}, or no drives"
            )
        if not self._has_restored_planes:
            self.planes.allocate_optimizer(optimizer)
        self._has_restored_planes = False

    # -- reading and writing --------------------------------------------------------------------------------

    @contextmanager
    def borrow(self, block: int, *, writes: bool = False, own: bool = False) -> Iterator[BlockState]:
        """Lend a block with all its planes, wherever they live, until the context ends.

        Whoever reads state and is no operation of a lane reads it here, after `engine.settle()`. What is on
        other nodes, or on devices of other ranks, comes from there: where `is_read_by_all`, all ranks borrow
        the same blocks, in one order. Where the caller `writes`, the first rank of each node does it, with
        the same values, and the node's part is kept. Of a block on devices the others take part, and write
        nothing.

        Args:
            block: The block's number.
            writes: Whether changes of the caller are kept; without, it must change nothing.
            own: A claim that only what this one of several nodes keeps is read: the rest is not there then.
        """
        is_on_device = self.on_device.holds(block)
        if not is_on_device and (writes or own or not self.is_parted):
            lent, buffer = self._lend(block)
            if buffer is not None:
                self._read(block, lent, buffer)
            yield lent
            if writes:
                self._keep(block, lent, buffer)
            return
        lent = self._bring(block, comes=not (writes or own))
        self._num_lent[block] += 1
        are_met = True
        try:
            yield lent
            if writes:
                self.on_device.take(block)
        except BaseException:
            are_met = not writes  # the others wait to take what will not come
            raise
        finally:
            self._num_lent[block] -= 1
            if are_met:
                self._ranks.meet("spread")
            if not self._num_lent[block]:
                self._drop(block)
            if are_met and is_on_device:
                self._ranks.meet()  # or another one would read in weights that this one is about to drop

    def follow(self, block: int) -> None:
        """Take part, on a rank that is not the first of its node, in what that one writes to a block."""
        if self.on_device.holds(block):
            with self.borrow(block, writes=True):
                pass

    def masters(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, fp32 value in a new tensor) lazily; names of one block should come together."""
        for numbers, group in groupby(names, key=lambda name: [number for number, _ in self._places[name]]):
            if len(numbers) > 1:
                for name in group:
                    yield name, torch.cat([self._master(*place) for place in self._places[name]])
                continue
            with self.borrow(numbers[0]) as block:
                for name in group:
                    yield name, block.master(block.entries[name])

    def _master(self, number: int, entry: Entry) -> Tensor:
        with self.borrow(number) as block:
            return block.master(entry)

    def put(self, name: str, value: Tensor, region: tuple[int | slice, ...] = ()) -> None:
        """Write `value` into `region` of a parameter (empty: all of it), splitting an fp32 master exactly.

        A block on the drives leaves once it is complete, and so does what other nodes keep of one in RAM.
        """
        for number, entry in self._places[name]:
            if entry.rows is None:
                self._put(number, entry, value, region)
                continue
            part, own = part_of_region(entry.rows, region, value)
            if own is not None:
                self._put(number, entry, part, own)

    def _put(self, number: int, entry: Entry, value: Tensor, region: tuple[int | slice, ...]) -> None:
        away = self.on_drives
        is_filled = away.holds_state(number) and number not in self._filling and away.is_filled(number)
        if is_filled or self.on_device.holds(number):
            with self.borrow(number, writes=True) as block:
                return write_value(block, entry, value, region)
        if number not in self._filling:
            self._filling[number] = self._lend(number)
        write_value(self._filling[number][0], entry, value, region)
        self.mark_changed(number)
        self.planes.on_write(number)
        self._num_filled[number] += value.numel()
        if self._num_filled[number] >= self.layouts[number].num_parameters:
            self._num_filled[number] = 0
            self._keep(number, *self._filling.pop(number))

    def codes_of(self, name: str) -> dict[str, Tensor]:
        """View the codes and scales of a parameter that is kept in an encoding, by the names of its parts."""
        ((number, entry),) = self._places[name]
        block = self.blocks[number]
        assert entry.encoding is not None
        return entry.encoding.views(block.codes[entry.codes_offset :])

    def value(self, name: str) -> Tensor:
        """Return a working weight to be read at once: a view of it, what its codes make, or parts joined."""
        parts = []
        for number, entry in self._places[name]:
            working = self.weights.read(number)
            if entry.encoding is None:
                parts.append(view_entry(working, entry))
            else:
                parts.append(decoded(working[self.layouts[number].plain_bytes :], entry))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bring_gradients(self) -> None:
        """Make all complete gradients readable on every node, whose whole plane is in memory from then on."""
        for number, state in enumerate(self.blocks) if self.is_parted else ():
            self.parts.bring(number, state, ["gradient"])

    def mark_changed(self, *blocks: int) -> None:
        """Take note that what is in RAM of blocks, or of all if none is given, may differ from its image."""
        if self.has_drives:
            self.changed.update(*map(self.on_drives.copied, blocks or range(len(self.layouts))))

    def planes_in_ram(self, block: int) -> dict[str, list[Tensor]]:
        """Return the parts of each plane of a block's image that live in RAM, in the image's order.

        Of the optimizer's planes only once there is one.
        """
        return self._kept(block, self.blocks[block], is_away=False)

    # -- inside ---------------------------------------------------------------------------------------------

    @property
    def _state_planes(self) -> tuple[str, ...]:
        """Planes that updates change beside the working weights, once they are there."""
        return "remainder", *self.optimizer.planes

    @property
    def _parted(self) -> frozenset[str]:
        """Planes of which each node keeps its part; none of a single node."""
        return frozenset({*self._state_planes, "gradient"} if self.is_parted else ())

    def _lend(self, number: int, memory: Arena | None = None) -> tuple[BlockState, Tensor | None]:
        """Return a whole block, with a buffer of its image on this node's drives; None: it is in RAM.

        Planes on the drives are views of `memory`, or of new memory: of the buffer, where that holds all.
        """
        if not self.on_drives.holds_state(number):
            return self.blocks[number], None
        image = self.on_drives.images[number]
        memory = Arena(image.whole.num_bytes) if memory is None else memory
        whole = memory.view(torch.uint8, 0, image.whole.num_bytes)
        return self.view(number, whole), whole if image.is_whole else page_memory(image.num_bytes)

    def view(self, number: int, memory: Tensor) -> BlockState:
        """View a block on drives in memory of its whole image, but for working weights that live in RAM."""
        state, image = self.blocks[number], self.on_drives.images[number].whole
        is_there = self.on_drives.holds_working(number)
        lent = BlockState(state.layout, image.working(memory) if is_there else state.working)
        for name, plane in image.planes(memory).items():
            lent.set_plane(name, plane)
        lent.gradient, lent.accumulator = state.gradient, state.accumulator
        return lent

    def _kept(self, number: int, state: BlockState, *, is_away: bool) -> dict[str, list[Tensor]]:
        """View what this node keeps of the planes of a block that are on drives, or of those in RAM."""
        names = ["working"] if self.on_drives.holds_working(number) is is_away else []
        names += state.planes if self.on_drives.holds_state(number) is is_away else []
        return {name: self.parts.own(number, state, [name]) for name in names}

    def _pairs(
        self, number: int, state: BlockState, buffer: Tensor, *, is_away: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the parts of `_kept` with their places in a buffer of the block's image."""
        image = self.on_drives.images[number]
        places = {**image.planes(buffer), "working": image.working(buffer)}
        for name, parts in self._kept(number, state, is_away=is_away).items():
            if parts:
                yield from zip(parts, places[name].split([len(part) for part in parts]), strict=True)

    def _read(self, number: int, lent: BlockState, buffer: Tensor) -> None:
        """Read what lives on the drives of a block into a buffer of its image, and what is lent."""
        self.on_drives.read(number, buffer, working=self.on_drives.holds_working(number))
        if not self.on_drives.images[number].is_whole:
            for part, place in self._pairs(number, lent, buffer, is_away=True):
                part.copy_(place)

    def _keep(self, number: int, lent: BlockState, buffer: Tensor | None) -> None:
        """Keep what was written to a block of `_lend`: this node's part of it, in RAM or on the drives."""
        if buffer is None:
            self._give_back(number)
        else:
            if not self.on_drives.images[number].is_whole:
                for part, place in self._pairs(number, lent, buffer, is_away=True):
                    place.copy_(part)
            both = self.on_drives.holds_working(number)
            self.on_drives.write(number, buffer, working=both)
            if both and self.weights.are_here:
                self.blocks[number].working.copy_(lent.working)
        self.mark_changed(number)
        self.planes.on_write(number)

    def _bring(self, block: int, *, comes: bool = True) -> BlockState:
        """Return the whole block, in memory that all ranks of the node map: all ranks call it.

        Args:
            block: The block's number.
            comes: Whether what other nodes keep of it is wanted.
        """
        lent, buffer = self._lend(block, self._lent)
        if self.on_device.holds(block):
            self.on_device.bring(block, has_working=self.weights.are_on_node())
        if buffer is not None and self._ranks.local_rank == 0:
            self._read(block, lent, buffer)
        if comes and self.is_parted:
            self.parts.bring(block, lent, self._state_planes)
        return lent

    def _drop(self, block: int) -> None:
        """Drop what `_bring` has brought."""
        if self._ranks.local_rank == 0:
            self._give_back(block)
            if self.on_drives.holds_state(block):
                self._lent.give_back(self._lent.view(torch.uint8, 0, self._lent.nbytes))

    def _give_back(self, block: int) -> None:
        """Drop what other nodes keep of the planes in RAM of a block, or all where it is on the device."""
        if self.on_device.holds(block):
            self.on_device.give_back(block, has_working=self.weights.are_here)
        elif not self.on_drives.holds_state(block):
            self.parts.give_back(block, self.blocks[block], self._state_planes, self.planes.arena_of)

    def _restore(self) -> None:
        """Read what lives in RAM from its images; a block that was never written has nothing to restore.

        Of several ranks of a node the first one reads, for all of them.
        """
        self.planes.allocate_optimizer(self._planned)
        for number, state in enumerate(self.blocks) if self._ranks.local_rank == 0 else ():
            if self.planes_in_ram(number):
                buffer = page_memory(self.on_drives.images[number].num_bytes)
                self.on_drives.read(number, buffer)
                for part, place in self._pairs(number, state, buffer, is_away=False):
                    part.copy_(place)
        self.on_drives.meet("orders")
        self._has_restored_planes = True
