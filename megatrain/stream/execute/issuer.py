"""Issues single operations: what each of them runs, in which lane, and the bytes that it moves.

Nothing here knows in which order operations come: a program says that, and the `Executor` follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeAlias

from megatrain.plan.program.operations import Buffer, Kind, Lane, Operation, weights_buffer
from megatrain.store.state import HostState
from megatrain.stream.execute.gradients import Gradients, Home
from megatrain.stream.execute.resident_state import DeviceStates
from megatrain.stream.execute.slots import Slots
from megatrain.stream.execute.state_on_drives import StateOnDrives
from megatrain.stream.lanes import Lanes

Work: TypeAlias = Callable[[Operation], Callable[[], object]]
"""Returns what a NORM or an UPDATE runs, made at the moment when it is issued."""


class ActivationCopies(Protocol):
    """What the executor needs of the activations that wait on the host."""

    def copy(self, operation: Operation) -> None:
        """Enqueue a SAVE, STOW, RECALL or RESTORE of the newest visit of a block and a micro-batch."""

    def sweep(self) -> None:
        """Drop what nobody will ask for: a backward is over."""

    def clear(self) -> None:
        """Drop everything, after an exception."""


class Issuer:
    """Enqueues operations in the lanes, and knows what they leave in the slots."""

    def __init__(
        self,
        lanes: Lanes,
        host: HostState,
        *,
        slots: Slots,
        gradients: Gradients,
        states: DeviceStates,
        activations: ActivationCopies,
        counts: Counts,
        drives: StateOnDrives | None,
    ) -> None:
        """Start with empty slots."""
        self.lanes = lanes
        self.states = states
        self._activations = activations
        self.drives = drives
        """None: the whole state is in RAM."""
        self.counts = counts
        self.host = host
        self._slots = slots
        self.gradients = gradients
        self.contents: list[int | None] = [None] * len(slots)
        """By slot: the block that is there, or will be."""
        self._stale: set[int] = set()
        """Outer blocks whose weights on the device are out of date."""
        self._staging = 0
        self.update_at_once: Work | None = None
        """Set by an optimizer that updates a block as soon as its gradient is complete."""

    # -- operations -----------------------------------------------------------------------------------------

    def forget_slots(self) -> None:
        """Take note that what the slots hold is out of date, and let lanes that check know it."""
        for slot, block in enumerate(self.contents):
            if block is not None:
                self._poison(block, slot)
        self.contents = [None] * len(self._slots)

    def _poison(self, block: int, slot: int) -> None:
        place = self._slots.place(block, slot)
        self.lanes.enqueue(Lane.FETCH, lambda: self.lanes.freed(place), writes=[weights_buffer(block, slot)])

    def run(self, operations: Iterable[Operation], work_of: Work | None = None) -> None:
        """Run operations in order.

        Args:
            operations: No visits among them.
            work_of: What their NORM and UPDATE do; None: what `update_at_once` says.
        """
        for operation in operations:
            self.issue(operation, work_of)

    def issue(self, operation: Operation, work_of: Work | None = None) -> None:
        """Enqueue one operation, and count what it moves."""
        match operation.kind:
            case Kind.FETCH:
                self._fetch(operation)
            case Kind.LOAD:
                if self.gradients.homes[operation.block] is Home.WAITING:
                    operation = replace(operation, waiting=operation.block, nbytes=0)
                self._enqueue(operation, self.gradients.load(operation))
                self.counts.fetch_bytes += operation.nbytes
            case Kind.HOLD:
                self._enqueue(operation, lambda: self.gradients.hold(operation))
                self.gradients.settle(operation)
            case Kind.OFFLOAD:
                self._offload(operation)
            case Kind.ROUND if operation.on_device:
                self._enqueue(operation, lambda: self.gradients.round_on_device(operation.block))
            case Kind.ROUND:
                self._enqueue(operation, lambda: self.gradients.complete_on_host(operation.block))
                self.gradients.settle_on_host(operation.block)
            case Kind.NORM:
                assert work_of is not None
                self._enqueue(operation, work_of(operation))
            case Kind.UPDATE:
                self._update(operation, work_of or self.update_at_once)
            case Kind.RELEASE:
                self._enqueue(operation, self.host.drop_gradients)
            case Kind.PULL | Kind.PUSH:
                self._enqueue(operation, self.states.copy(operation))
            case Kind.SYNC:
                with self.touching(reads=operation.reads):
                    pass
            case Kind.READ | Kind.PAGE | Kind.WRITE | Kind.SPILL | Kind.SEAL | Kind.COMMIT:
                assert self.drives is not None
                self.counts.count_drives(operation)
                self._enqueue(operation, self.drives.work(operation))
            case Kind.SAVE | Kind.STOW | Kind.RECALL | Kind.RESTORE:
                self._activations.copy(operation)
            case _:
                raise AssertionError(f"{operation} is a visit: the model makes it")

    def _fetch(self, operation: Operation) -> None:
        if operation.slot >= 0:
            self.contents[operation.slot] = operation.block
        self._stale.discard(operation.block)
        source = self.host.blocks[operation.block].working
        if operation.page >= 0:
            assert self.drives is not None
            source = self.drives.page(operation)
        target = self._slots.target(operation)
        self._enqueue(operation, lambda: target.copy_(source, non_blocking=True))
        self.counts.fetches += operation.slot >= 0
        self.counts.fetch_bytes += operation.nbytes

    def _offload(self, operation: Operation) -> None:
        if operation.is_held:
            self._enqueue(operation, lambda: self.gradients.take_home(operation))
            self.counts.offloads += operation.waiting >= 0
        else:
            self._enqueue(operation, lambda: self.gradients.offload(operation))
            self.gradients.settle(operation)
            self.counts.offloads += operation.gradient_buffer >= 0
        self.counts.offload_bytes += operation.nbytes

    def _update(self, operation: Operation, work_of: Work | None) -> None:
        """Update a block where its state is, behind the norm or as soon as its gradient is complete."""
        assert work_of is not None
        self._enqueue(operation, work_of(operation))
        if operation.on_device:
            self.states.settle_update(operation.block)
            return
        self.counts.update_bytes += operation.nbytes
        if not operation.follows_norm:
            self.gradients.settle_update(operation.block)
            self._staging = (operation.staging + 1) % max(1, self.gradients.buffers.num_staging)
        if self.drives is not None:
            self.drives.settle_update(operation.block)

    def _enqueue(self, operation: Operation, function: Callable[[], object]) -> None:
        self.lanes.enqueue(
            operation.lane,
            function,
            reads=operation.reads,
            writes=operation.writes,
            work=operation.nbytes,
            label=str(operation),
        )

    # -- waiting --------------------------------------------------------------------------------------------

    @contextmanager
    def touching(self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> Iterator[None]:
        """Let the launching thread use host memory, once all others are done with it."""
        self.lanes.begin(Lane.CALLER, reads=reads, writes=writes)
        try:
            yield
        finally:
            self.lanes.end(Lane.CALLER, reads=reads, writes=writes)

    def wait_for_norm(self) -> None:
        """Block until the last step's norm is known; raises what kept it from that."""
        with self.touching(reads=[("norm", 0)]):
            pass


class Counts:
    """What the engine has moved since attach."""

    def __init__(self) -> None:
        self.fetches = 0
        """Fetches of streamed blocks."""
        self.offloads = 0
        """Offloads of streamed blocks' gradients."""
        self.fetch_bytes = 0
        self.offload_bytes = 0
        self.update_bytes = 0
        """Host memory that updates have read and written."""
        self.drive_read_bytes = 0
        """State and weights from the drives; `OffloadedActivations.drive_bytes` counts activations."""
        self.drive_write_bytes = 0
        """State to the drives, commits included."""
        self.chunked_tokens = 0
        """Tokens that have passed the head in chunks, and pass it again in the backward."""

    def count_drives(self, operation: Operation) -> None:
        """Count what an operation reads from the drives, or writes there."""
        self.drive_read_bytes += operation.nbytes if operation.kind in (Kind.READ, Kind.PAGE) else 0
        self.drive_write_bytes += operation.nbytes if operation.kind is Kind.WRITE else 0
