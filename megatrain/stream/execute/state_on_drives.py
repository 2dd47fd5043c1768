"""State on drives in a step: what READ, PAGE, WRITE, SPILL and COMMIT do, and the buffers that they pass.

The lanes order everything by these buffers and by the blocks' images on the drives. What must stay true: a
commit is enqueued behind all writes of its step and before any of the next, in the lane of writes, so that it
never holds parts of two steps; and one that follows an update whose write was lost fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatrain.errors import OutputError
from megatrain.plan.program.drive_traffic import with_state_through, with_weights_through
from megatrain.plan.program.operations import Kind, Lane, Operation
from megatrain.store.tiered import TieredState
from megatrain.stream.lanes import Lanes

if TYPE_CHECKING:
    from megatrain.stream.execute.executor import Executor

_log = logging.getLogger(__name__)


class StateOnDrives:
    """The lanes' side of a state that is in part on drives."""

    def __init__(self, lanes: Lanes, host: TieredState) -> None:
        """Allocate the buffers."""
        self._lanes = lanes
        self._host = host
        self.on_drives = host.on_drives
        self._staging, self._pages = host.allocate_buffers()
        lanes.lock(host.arena("staging of weights"))
        images = self.on_drives.images
        self._update_bytes = [
            image.num_bytes if self.on_drives.holds_working(block) else image.working_start
            for block, image in enumerate(images)
        ]
        self._fetch_bytes = [image.num_bytes - image.working_start for image in images]
        self._ready = [False] * len(self._staging)
        """By buffer: an update has put something there that is to be written."""
        self._num_writes = 0
        """Writes of updates that were enqueued."""
        self._num_written = 0
        self._turn = 0

    # -- programs -------------------------------------------------------------------------------------------

    def around_updates(self, operations: Sequence[Operation]) -> list[Operation]:
        """Put reads before the updates of blocks on the drives, and writes behind them."""
        there = self.on_drives.placement.state_on_drives
        return with_state_through(operations, there, self._update_bytes, len(self._staging))

    def around(self, operations: Sequence[Operation]) -> list[Operation]:
        """Do this for updates and for fetches."""
        there = self.on_drives.placement.working_on_drives
        return with_weights_through(
            self.around_updates(operations), there, self._fetch_bytes, len(self._pages)
        )

    # -- operations -----------------------------------------------------------------------------------------

    def page(self, operation: Operation) -> Tensor:
        """Return the working bytes of a block in the buffer through which its fetch goes."""
        return self._pages[operation.page][: self._host.layouts[operation.block].working_bytes]

    def planes(self, operation: Operation) -> dict[str, Tensor | None]:
        """Return the planes that an update of a block on the drives changes."""
        image, buffer = self.on_drives.images[operation.block], self._staging[operation.drive_staging]
        is_there = self.on_drives.holds_working(operation.block)
        working = image.working(buffer) if is_there else self._host.blocks[operation.block].working
        return {"remainder": None, **image.planes(buffer), "working": working}

    def updated(self, operation: Operation) -> None:
        """Note, in the lane of the update, that the buffer holds something new."""
        self._ready[operation.drive_staging] = True

    def settle_update(self, block: int) -> None:
        """Note, when an update is enqueued, that what is in RAM of the block will differ from its image."""
        self._host.mark_updated(block)

    def work(self, operation: Operation) -> Callable[[], object]:
        """Return what a READ, PAGE or WRITE does."""
        if operation.kind is Kind.WRITE:
            self._num_writes += 1
        return {Kind.READ: self._read, Kind.PAGE: self._read_page, Kind.WRITE: self._write}[operation.kind](
            operation
        )

    def _read(self, operation: Operation) -> Callable[[], object]:
        block, buffer = operation.block, self._staging[operation.drive_staging]

        def run() -> None:
            self._ready[operation.drive_staging] = False
            self.on_drives.read(block, buffer, working=self.on_drives.holds_working(block))

        return run

    def _read_page(self, operation: Operation) -> Callable[[], object]:
        return lambda: self.on_drives.read(operation.block, self._pages[operation.page], state=False)

    def _write(self, operation: Operation) -> Callable[[], object]:
        block, buffer = operation.block, self._staging[operation.drive_staging]

        def run() -> None:
            if self._ready[operation.drive_staging]:  # not so in a step that is skipped
                self._ready[operation.drive_staging] = False
                self.on_drives.write(block, buffer, working=self.on_drives.holds_working(block))
            self._num_written += 1

        return run

    # -- commits --------------------------------------------------------------------------------------------

    def commit(
        self,
        executor: Executor,
        step: int,
        meta: Mapping[str, Any],
        finish: Callable[[], Mapping[str, Any]] | None,
    ) -> None:
        """Enqueue a commit of the state after all updates that were enqueued before; see `Engine.commit`."""
        executor.states.push()
        for block, is_working in sorted(self._host.changed):
            self._spill(executor, block, is_working=is_working)
        self._host.changed.clear()
        whole: dict[str, Any] = {}

        def seal() -> None:
            whole.update(meta)
            whole.update(finish() if finish is not None else {})

        self._lanes.enqueue(Lane.HOST, seal, writes=[("meta", 0)], label="seal")
        expected = self._num_writes

        def run() -> None:
            if self._num_written != expected:
                raise OutputError(
                    f"step {step} cannot be committed: {expected - self._num_written} writes to the drives "
                    "were lost after an earlier failure; start the same command again to go on from the last "
                    "step that was"
                )
            self.on_drives.store.commit(step, whole)

        blocks = tuple(range(len(self._host.layouts)))
        executor.enqueue(Operation(kind=Kind.COMMIT, blocks=blocks), run)

    def _spill(self, executor: Executor, block: int, *, is_working: bool) -> None:
        """Write the state, or the weights, of a block that lives in RAM, piece by piece."""
        image = self.on_drives.images[block]
        state = self._host.blocks[block]
        for piece in image.of(state=not is_working, working=is_working):
            turn, self._turn = self._turn, (self._turn + 1) % len(self._staging)
            buffer = self._staging[turn][: piece.stop - piece.start]

            def fill(piece: Any = piece, buffer: Tensor = buffer) -> None:
                planes = {"working": state.working} if is_working else self._host.planes_in_ram(block)
                self.on_drives.fill(piece, block, planes, buffer)

            def write(piece: Any = piece, buffer: Tensor = buffer) -> None:
                self.on_drives.store.write(piece.extent, buffer)
                self._num_written += 1

            spill = Operation(kind=Kind.SPILL, block=block, drive_staging=turn, nbytes=buffer.numel())
            executor.enqueue(spill, fill)
            self._num_writes += 1
            executor.enqueue(replace(spill, kind=Kind.WRITE), write)
