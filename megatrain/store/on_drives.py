"""State of blocks on drives: how a block's planes lie there, and how they get there and back.

The image of a block is its remainder and the optimizer's planes, padded to whole pages, then `working`
padded alike. It is cut into pieces, which are the extents of the store. Every block has an image on the
drives, because a commit must hold all state; of blocks in RAM it is only written. The ranks of a node keep
one such image, in the same files: each reads and writes its own chunks of it, from and to buffers that all
of them map. Of several nodes each has images of its own, of what it keeps: all weights, and a part of the
rest. They are equally large on all nodes, so some have room left, and all do the same operations.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.runs import SumRoom
from megatrain.errors import CheckpointError
from megatrain.layout import pools
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.drive_chunks import first_turn
from megatrain.layout.host_buffers import pieces_of
from megatrain.layout.ownership import Share, drive_totals, node_shares, shares, whole_share
from megatrain.store.arena import Arena
from megatrain.store.drives.drive import wait
from megatrain.store.drives.places import make_place
from megatrain.store.drives.record import CommitRecord, newest_of_all, nothing_in_common, read_records
from megatrain.store.drives.striped import Extent, StripedStore
from megatrain.store.placement import Placement, Tiers, place, placed
from megatrain.store.ranks import StateRanks


class Piece(NamedTuple):
    """A range of a block's image that is one extent of the store."""

    extent: int
    start: int
    stop: int
    is_working: bool


@dataclass(frozen=True, slots=True)
class Image:
    """Where the planes of one block lie in its image."""

    layout: BlockLayout
    share: Share
    """What of the block's state is there; of one node, all of it."""
    room: BlockBytes
    """Sizes of what there is room for: on no node is more of it."""
    optimizer: Optimizer
    pieces: tuple[Piece, ...]

    @property
    def working_start(self) -> int:
        """First byte of the working weights."""
        return pools.state_image(self.room, self.optimizer)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole image."""
        return self.working_start + pools.weights_image(self.room)

    def planes(self, buffer: Tensor) -> dict[str, Tensor]:
        """View the planes of the share, without `working`, in a buffer of the image or its first part."""
        planes = [("remainder", len(self.share.split), torch.int16)]
        for name, plane in self.optimizer.planes.items():
            planes.append((name, plane.numel(self.share.numel, 0), getattr(torch, plane.element)))
        views, start = {}, 0
        for name, numel, dtype in planes:
            stop = start + numel * dtype.itemsize
            if numel:
                views[name] = buffer[start:stop].view(dtype)
            start = stop
        return views

    def working(self, buffer: Tensor) -> Tensor:
        """View the working bytes in a buffer that holds the whole image."""
        return buffer[self.working_start : self.working_start + self.layout.working_bytes]

    @property
    def is_whole(self) -> bool:
        """Whether all of the block's state is there, and not a node's part of it."""
        return self.share.numel == self.layout.num_state

    @property
    def whole(self) -> Image:
        """The image of all of the block, as it is in memory where the block is lent."""
        layout = self.layout
        return replace(self, share=whole_share(layout.sizes), room=layout.sizes)


class BlocksOnDrives:
    """The images of all blocks, and the store that holds them."""

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        tiers: Tiers | None,
        optimizer: Optimizer,
        *,
        sum_room: SumRoom,
        ranks: StateRanks,
    ) -> None:
        """Decide where everything is; nothing is opened. Of several ranks the first one decides.

        Args:
            layouts: The layouts of all blocks.
            tiers: The limit of RAM, and the drives; None: there are no drives, and everything is in RAM.
            optimizer: The optimizer whose state it is.
            sum_room: The room for partial sums, as `place` takes it.
            ranks: The ranks that keep the state.

        Raises:
            CapacityError: RAM does not hold what must be there.
            ConfigError: The optimizer's state does not go on drives.
        """
        self.tiers = tiers
        self._ranks = ranks
        self.rank, self.num_ranks = ranks.local_rank, ranks.local_size
        """This one's place on its node, and how many there are."""
        self.planes = ("remainder", *optimizer.planes)
        """What an image holds beside `working`, in order."""
        self.images: list[Image] = []
        if tiers is None:
            self.placement = Placement()
            self.store = StripedStore([], [])
            return
        optimizer.require_elements("drives cut")
        self.placement = _place(layouts, tiers, optimizer, sum_room, ranks)
        extents: list[Extent] = []
        self.images = _images(layouts, extents, optimizer, ranks)
        kept = [image.share.ranges for image in self.images] if ranks.num_nodes > 1 else ""
        self.store = StripedStore(
            tiers.of_node(ranks.node, ranks.num_nodes),
            extents,
            owner=tiers.owner,
            kept=str(kept),
            part=(self.rank, self.num_ranks),
            memory=lambda nbytes: page_memory(nbytes, ranks.shared_memory(nbytes)),
        )

    def open(self) -> CommitRecord | None:
        """Open the drives: anew, or with what was committed there, which the first rank of a node gets.

        Raises:
            CheckpointError: `tiers.resumes`, and the drives hold no state of this model, or those of nodes no
                step that all have.
            MegatrainError: `StripedStore` refuses.
        """
        if self.tiers is None:
            return None
        found, are_nodes = None, self._ranks.num_nodes > 1
        for directory in self.tiers.nvme if are_nodes and self.rank == 0 else ():
            make_place(directory)
        if self.tiers.resumes:
            step = self._step_of_all(self.tiers) if are_nodes else None
            found = self.store.resume(step) if self.rank == 0 else None
        else:
            start = self._of_nodes([secrets.randbits(62)])[0][0] if are_nodes else 0
            if self.rank == 0:
                self.store.create(start)
        self.meet("orders")  # in which ranks wait for as long as the first one takes
        if self.rank:
            self.store.join()
        return found

    def meet(self, lane: str) -> None:
        """Wait for the other ranks, if there are any, in a lane of theirs."""
        self._ranks.meet(lane)

    def commit(self, step: int, meta: Mapping[str, Any]) -> None:
        """Make what is newest on the drives what a crash leaves; every rank calls it.

        Raises:
            OutputError, CapacityError: `StripedStore` cannot make it durable.
        """
        meet = partial(self.meet, "write") if self._ranks.num_nodes > 1 else None
        if self.rank == 0:
            self.store.commit(step, meta, meet)
        elif meet is not None:
            meet()
        self.meet("write")

    def _step_of_all(self, tiers: Tiers) -> int:
        """Return the newest step that the drives of every node hold."""
        records = read_records(self.store.directories[0]) if self.rank == 0 else []
        start = max((int(record.drives[0].partition("-")[0], 16) for record in records), default=-1)
        told = self._of_nodes([start, *(record.step for record in records), -1, -1][:3])
        held = [[step for step in steps if step >= 0] for _, *steps in told]
        step = newest_of_all(held)
        if step is None or len({start for start, *_ in told}) > 1:
            raise CheckpointError(nothing_in_common(held, tiers.of_node(0, self._ranks.num_nodes)[0]))
        return step

    def _of_nodes(self, mine: list[int]) -> list[list[int]]:
        """Return what the first rank of each node says, in as many numbers."""
        return [each.tolist() for each in self._ranks.gather(torch.tensor(mine), "orders")[:: self.num_ranks]]

    def holds_state(self, block: int) -> bool:
        """Whether a block's remainder and optimizer state live on the drives."""
        return block in self.placement.state_on_drives

    def holds_working(self, block: int) -> bool:
        """Whether a block's working weights live on the drives."""
        return block in self.placement.working_on_drives

    def copied(self, block: int) -> set[tuple[int, bool]]:
        """Return (block, is it the working weights) of what lives in RAM, and has a copy on the drives."""
        away = (False, self.placement.state_on_drives), (True, self.placement.working_on_drives)
        return {(block, is_working) for is_working, there in away if self.images and block not in there}

    def bytes_per_step(self) -> tuple[int, int, int]:
        """Return the bytes that a step reads and writes for its updates, and what a first commit adds."""
        states = [image.working_start for image in self.images]
        weights = [image.num_bytes - image.working_start for image in self.images]
        there = self.placement.state_on_drives
        paged = self.placement.working_on_drives
        updates = sum(states[b] + (weights[b] if b in paged else 0) for b in there if states[b])
        frozen = sum(weights[b] for b in paged if not states[b])
        return updates, updates, sum(states) + sum(weights) - updates - frozen

    def read(
        self, block: int, buffer: Tensor, *, state: bool = True, working: bool = True, is_own: bool = False
    ) -> int:
        """Read parts of an image into a buffer at a page's address; returns the bytes read.

        `is_own`: of several ranks, this one's chunks alone.

        Raises:
            CheckpointError: A drive does not give back what was written.
        """
        parts = self._parts(block, buffer, state=state, working=working)
        wait(f for extent, part in parts for f in self.store.submit_read(extent, part, is_own=is_own))
        return self._moved(parts, is_own=is_own)

    def write(
        self, block: int, buffer: Tensor, *, state: bool = True, working: bool = True, is_own: bool = False
    ) -> int:
        """Write parts of an image; returns the bytes written. The arguments are those of `read`.

        Raises:
            OutputError: A drive does not take it.
        """
        parts = self._parts(block, buffer, state=state, working=working)
        self.store.write_all(parts, is_own=is_own)
        return self._moved(parts, is_own=is_own)

    def _parts(self, block: int, buffer: Tensor, *, state: bool, working: bool) -> list[tuple[int, Tensor]]:
        """Pair the extents of these parts of an image with their places in a buffer that begins with them."""
        image = self.images[block]
        shift = 0 if state else image.working_start
        wanted = (piece for piece in image.pieces if (working if piece.is_working else state))
        return [(piece.extent, buffer[piece.start - shift : piece.stop - shift]) for piece in wanted]

    def _moved(self, parts: Sequence[tuple[int, Tensor]], *, is_own: bool) -> int:
        return sum(len(span) for extent, _ in parts for span in self.store.spans(extent, is_own=is_own))

    def is_filled(self, block: int) -> bool:
        """Whether all of a block that lives on the drives was ever written there."""
        working = self.holds_working(block)
        return all(
            self.store.has(piece.extent)
            for piece in self.images[block].pieces
            if working or not piece.is_working
        )

    def fill(self, piece: Piece, block: int, planes: dict[str, list[Tensor]], buffer: Tensor) -> None:
        """Copy this rank's chunks of one piece of a block that lives in RAM into a buffer.

        Args:
            piece: The piece of the block's image.
            block: The number of the block.
            planes: The planes of the image that live in RAM, by name, `working` included; each is in parts
                that follow one another there.
            buffer: The buffer, whose first bytes are overwritten at the places of the chunks.
        """
        image = self.images[block]
        own = list(self.store.spans(piece.extent, is_own=True))
        if not piece.is_working and any(name not in planes for name in image.optimizer.planes):
            for span in own:
                buffer[span.start : span.stop].zero_()  # no optimizer yet
        spans, start = [], image.working_start if piece.is_working else 0
        for name in ("working",) if piece.is_working else self.planes:
            for part in planes.get(name, ()):
                spans.append((start, part.view(torch.uint8)))
                start += part.nbytes
        for start, plane in spans:
            for span in own:
                low = max(start, piece.start + span.start)
                high = min(start + plane.numel(), piece.start + span.stop)
                if low < high:
                    buffer[low - piece.start : high - piece.start].copy_(plane[low - start : high - start])


def page_memory(nbytes: int, file: int | None = None) -> Tensor:
    """Return (nbytes,) uint8 zeros at a page's address, of memory that several map if that is `file`."""
    return Arena(nbytes, file).view(torch.uint8, 0, nbytes)


def _place(
    layouts: Sequence[BlockLayout],
    tiers: Tiers,
    optimizer: Optimizer,
    sum_room: SumRoom,
    ranks: StateRanks,
) -> Placement:
    """Place the state as the first rank does: what is left of RAM is not the same for all."""
    kept: dict[str, Any] = {"optimizer": optimizer, "sum_room": sum_room, "ranks": ranks}
    found = place(layouts, tiers, **kept) if ranks.rank == 0 else None
    away = (0, 0) if found is None else (len(found.working_on_drives), len(found.state_on_drives))
    first = ranks.gather(torch.tensor([len(layouts) - count for count in away]))[0].tolist()
    return found or placed(layouts, tiers, *first, **kept)


def _images(
    layouts: Sequence[BlockLayout], extents: list[Extent], optimizer: Optimizer, ranks: StateRanks
) -> list[Image]:
    """Cut the images of what this node keeps of all blocks into pieces, and add these to the extents."""
    rooms = drive_totals((layout.sizes for layout in layouts), ranks.size, ranks.num_nodes).sizes
    images = []
    for number, (layout, room) in enumerate(zip(layouts, rooms, strict=True)):
        share = whole_share(layout.sizes)
        if ranks.num_nodes > 1:
            share = node_shares(shares(layout.sizes, number, ranks.size), ranks.num_nodes)[ranks.node]
        image = Image(layout, share, room, optimizer, ())
        edge, end = image.working_start, image.num_bytes
        pieces = []
        for first, last, part in ((0, edge, "state"), (edge, end, "weights")):
            start = first
            for nbytes in pieces_of(last - first):
                stop = start + nbytes
                label = f", bytes {start - first} to {stop - first}" if nbytes < last - first else ""
                pieces.append(Piece(len(extents), start, stop, part == "weights"))
                turn = first_turn(number, start - first)
                extents.append(Extent(f"the {part} of block {number}{label}", nbytes, turn))
                start = stop
        images.append(replace(image, pieces=tuple(pieces)))
    return images
