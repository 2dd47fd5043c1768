"""State on drives in a step: what its operations read, write and commit, and the buffers that these pass.

The lanes order everything by these buffers and by the blocks' images on the drives. What must stay true: a
commit is enqueued behind all writes of its step and before any of the next, in the lane of writes, so that it
never holds parts of two steps; and one that follows an update whose write was lost fails.

The ranks of a node keep one image of each block, and map the same buffers of state. Each reads and writes its
own chunks, which ends when all have, so what follows finds the whole image. Their first one commits, of
several nodes once all have prepared that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import OutputError
from megatrain.layout.ownership import Share
from megatrain.plan.program.operations import Work
from megatrain.store.on_drives import Piece
from megatrain.store.state import HostState
from megatrain.stream.lanes import Lanes


class StateOnDrives:
    """The lanes' side of a state that is in part on drives."""

    def __init__(self, lanes: Lanes, host: HostState) -> None:
        """Allocate the buffers."""
        self._host = host
        self.on_drives = host.on_drives
        self._staging, self._pages = host.planes.allocate_buffers()
        lanes.lock(host.arena("staging of weights"))
        self._ready = [False] * len(self._staging)
        """By buffer: an update has put something there that is to be written."""
        self._num_writes = 0
        """Writes that were enqueued."""
        self._num_written = 0
        self._commit: tuple[int, dict[str, Any], Callable[[], Mapping[str, Any]] | None] = (0, {}, None)
        """Of the commit that is being enqueued: its step, what it says of the run, and what adds to that."""

    # -- operations -----------------------------------------------------------------------------------------

    def page(self, block: int, page: int) -> Tensor:
        """Return the working bytes of a block in the buffer through which its fetch goes."""
        return self._pages[page][: self._host.layouts[block].working_bytes]

    def planes(self, block: int, buffer: int) -> tuple[dict[str, Tensor], Share]:
        """Return the planes that an update of a block on the drives changes, and what of its state they are.

        Working weights are of the whole block.
        """
        image, bytes_there = self.on_drives.images[block], self._staging[buffer]
        empty = bytes_there[:0].view(torch.float32)  # where other nodes keep all
        none = dict.fromkeys(self.on_drives.planes, empty)
        return {**none, **image.planes(bytes_there), "working": self.working(block, buffer)}, image.share

    def working(self, block: int, buffer: int) -> Tensor:
        """Return the working weights that an update of a block, or what joins all ranks', changes."""
        if buffer < 0 or not self.on_drives.holds_working(block):
            return self._host.blocks[block].working
        return self.on_drives.images[block].working(self._staging[buffer])

    def updated(self, buffer: int) -> None:
        """Note, in the lane of the update, that the buffer holds something new."""
        self._ready[buffer] = True

    def settle_update(self, block: int) -> None:
        """Note, when an update is enqueued, that what is in RAM of the block will differ from its image."""
        self._host.mark_changed(block)

    def read(self, block: int, buffer: int) -> Work:
        """Return the read of a block's state into a buffer."""

        def run() -> None:
            self._ready[buffer] = False
            working = self.on_drives.holds_working(block)
            self.on_drives.read(block, self._staging[buffer], working=working, is_own=True)
            self.on_drives.meet("read")

        return run

    def read_page(self, block: int, page: int) -> Work:
        """Return the read of a block's working weights into a page."""
        return lambda: self.on_drives.read(block, self._pages[page], state=False)

    def write(self, block: int, buffer: int) -> Work:
        """Return the write of what an update has left in a buffer."""

        def write() -> None:
            if self._ready[buffer]:  # not so in a step that is skipped
                self._ready[buffer] = False
                working = self.on_drives.holds_working(block)
                self.on_drives.write(block, self._staging[buffer], working=working, is_own=True)

        return self._write(write)

    def _write(self, write: Callable[[], object]) -> Work:
        """Return a write that the next commit expects; it ends when all ranks of the node have written."""
        self._num_writes += 1

        def run() -> None:
            write()
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

    def spill(self, block: int, buffer: int, number: int) -> Work:
        """Return the copy of a piece of a block's state in RAM to a buffer."""
        piece, target = self._piece(block, buffer, number)

        return lambda: self.on_drives.fill(piece, block, self._host.planes_in_ram(block), target)

    def write_piece(self, block: int, buffer: int, number: int) -> Work:
        """Return the write of such a piece."""
        piece, source = self._piece(block, buffer, number)
        return self._write(lambda: self.on_drives.store.write(piece.extent, source, is_own=True))

    def _piece(self, block: int, buffer: int, number: int) -> tuple[Piece, Tensor]:
        piece = self.on_drives.images[block].pieces[number]
        return piece, self._staging[buffer][: piece.stop - piece.start]

    def seal(self) -> Work:
        """Return what takes down what the commit says of the run."""
        _step, whole, finish = self._commit

        def run() -> None:
            whole.update(finish() if finish is not None else {})
            self.on_drives.meet("norm")  # in the lane of updates: none may change what another rank spills

        return run

    def make_commit(self) -> Work:
        """Return what makes all that was written what a crash leaves."""
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
