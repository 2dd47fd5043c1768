"""State on drives in a step: what READ, PAGE, WRITE, SPILL and COMMIT do, and the buffers that they pass.

The lanes order everything by these buffers and by the blocks' images on the drives. What must stay true: a
commit is enqueued behind all writes of its step and before any of the next, in the lane of writes, so that it
never holds parts of two steps; and one that follows an update whose write was lost fails.

The ranks of a node keep one image of each block, and map the same buffers of state. Each reads and writes its
own chunks; READ and WRITE end when all have, so what follows finds the whole image. Their first one commits,
of several nodes once all have prepared that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import OutputError
from megatrain.layout.ownership import Share
from megatrain.plan.program.kinds import Kind
from megatrain.plan.program.operations import Operation
from megatrain.store.on_drives import PLANES, Piece
from megatrain.store.tiered import TieredState
from megatrain.stream.lanes import Lanes


class StateOnDrives:
    """The lanes' side of a state that is in part on drives."""

    def __init__(self, lanes: Lanes, host: TieredState) -> None:
        """Allocate the buffers."""
        self._host = host
        self.on_drives = host.on_drives
        self._staging, self._pages = host.allocate_buffers()
        lanes.lock(host.arena("staging of weights"))
        self._ready = [False] * len(self._staging)
        """By buffer: an update has put something there that is to be written."""
        self._num_writes = 0
        """Writes that were enqueued."""
        self._num_written = 0
        self._commit: tuple[int, dict[str, Any], Callable[[], Mapping[str, Any]] | None] = (0, {}, None)
        """Of the commit that is being enqueued: its step, what it says of the run, and what adds to that."""

    # -- operations -----------------------------------------------------------------------------------------

    def page(self, operation: Operation) -> Tensor:
        """Return the working bytes of a block in the buffer through which its fetch goes."""
        return self._pages[operation.page][: self._host.layouts[operation.block].working_bytes]

    def planes(self, operation: Operation) -> tuple[dict[str, Tensor], Share]:
        """Return the planes that an update of a block on the drives changes, and what of its state they are.

        Working weights are of the whole block.
        """
        image, buffer = self.on_drives.images[operation.block], self._staging[operation.drive_staging]
        none = dict.fromkeys(PLANES, buffer[:0].view(torch.float32))  # where other nodes keep all
        return {**none, **image.planes(buffer), "working": self.working(operation)}, image.share

    def working(self, operation: Operation) -> Tensor:
        """Return the working weights that an update of a block, or its SPREAD, changes."""
        if operation.drive_staging < 0 or not self.on_drives.holds_working(operation.block):
            return self._host.blocks[operation.block].working
        return self.on_drives.images[operation.block].working(self._staging[operation.drive_staging])

    def updated(self, operation: Operation) -> None:
        """Note, in the lane of the update, that the buffer holds something new."""
        self._ready[operation.drive_staging] = True

    def settle_update(self, block: int) -> None:
        """Note, when an update is enqueued, that what is in RAM of the block will differ from its image."""
        self._host.mark_updated(block)

    def work(self, operation: Operation) -> Callable[[], object]:
        """Return what an operation on the drives does."""
        if operation.kind is Kind.WRITE:
            self._num_writes += 1
            return self._write(operation) if operation.piece < 0 else self._write_piece(operation)
        works = {
            Kind.READ: self._read,
            Kind.PAGE: self._read_page,
            Kind.SPILL: self._spill,
            Kind.SEAL: self._seal,
            Kind.COMMIT: self._make_commit,
        }
        return works[operation.kind](operation)

    def _read(self, operation: Operation) -> Callable[[], object]:
        block, buffer = operation.block, self._staging[operation.drive_staging]

        def run() -> None:
            self._ready[operation.drive_staging] = False
            self.on_drives.read(block, buffer, working=self.on_drives.holds_working(block), is_own=True)
            self.on_drives.meet("read")

        return run

    def _read_page(self, operation: Operation) -> Callable[[], object]:
        return lambda: self.on_drives.read(operation.block, self._pages[operation.page], state=False)

    def _write(self, operation: Operation) -> Callable[[], object]:
        block, buffer = operation.block, self._staging[operation.drive_staging]

        def run() -> None:
            if self._ready[operation.drive_staging]:  # not so in a step that is skipped
                self._ready[operation.drive_staging] = False
                working = self.on_drives.holds_working(block)
                self.on_drives.write(block, buffer, working=working, is_own=True)
            self.on_drives.meet("write")
            self._num_written += 1

        return run

    # -- commits --------------------------------------------------------------------------------------------

    def begin_commit(
        self, step: int, meta: Mapping[str, Any], finish: Callable[[], Mapping[str, Any]] | None
    ) -> list[tuple[int, bool]]:
        """Begin a commit, whose operations are enqueued next; see `Engine.commit`.

        Returns:
            (block, is it the working weights) of what lives in RAM and differs from its image.
        """
        self._commit = step, dict(meta), finish
        changed = sorted(self._host.changed)
        self._host.changed.clear()
        return changed

    def _spill(self, operation: Operation) -> Callable[[], object]:
        block, piece, buffer = operation.block, self._piece(operation), self._piece_buffer(operation)

        def run() -> None:
            state = self._host.blocks[block]
            planes = {"working": [state.working]} if piece.is_working else self._host.planes_in_ram(block)
            self.on_drives.fill(piece, block, planes, buffer)

        return run

    def _write_piece(self, operation: Operation) -> Callable[[], object]:
        extent, buffer = self._piece(operation).extent, self._piece_buffer(operation)

        def run() -> None:
            self.on_drives.store.write(extent, buffer, is_own=True)
            self.on_drives.meet("write")
            self._num_written += 1

        return run

    def _piece(self, operation: Operation) -> Piece:
        return self.on_drives.images[operation.block].pieces[operation.piece]

    def _piece_buffer(self, operation: Operation) -> Tensor:
        piece = self._piece(operation)
        return self._staging[operation.drive_staging][: piece.stop - piece.start]

    def _seal(self, operation: Operation) -> Callable[[], object]:
        _step, whole, finish = self._commit

        def run() -> None:
            whole.update(finish() if finish is not None else {})
            self.on_drives.meet("norm")  # in the lane of updates: none may change what another rank spills

        return run

    def _make_commit(self, operation: Operation) -> Callable[[], object]:
        expected = self._num_writes
        step, whole, _finish = self._commit

        def run() -> None:
            if self._num_written != expected:
                raise OutputError(
                    f"step {step} cannot be committed: {expected - self._num_written} writes to the drives "
                    "were lost after an earlier failure; start the same command again to go on from the last "
                    "step that was"
                )
            self.on_drives.commit(step, whole)

        return run
