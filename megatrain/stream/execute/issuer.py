"""Issues single operations: what each of them runs, in which lane, and the bytes that it moves.

Nothing here knows in which order operations come: a program says that, and the `Executor` follows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from megatrain.plan.program.operations import Buffer, Kind, Lane, Operation, weights_buffer
from megatrain.store.state import HostState
from megatrain.stream.activations.offload import OffloadedActivations
from megatrain.stream.execute.gradients import Gradients, Home
from megatrain.stream.execute.resident_state import DeviceStates
from megatrain.stream.execute.slots import Slots
from megatrain.stream.execute.state_on_drives import StateOnDrives
from megatrain.stream.lanes import Lanes

Updater = Callable[[Operation], Callable[[], object]]
"""Returns what an UPDATE operation runs, made at the moment when it is issued."""


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
        offloaded: OffloadedActivations,
        counts: Counts,
        drives: StateOnDrives | None,
    ) -> None:
        """Start with empty slots."""
        self.lanes = lanes
        self.states = states
        self.offloaded = offloaded
        self.drives = drives
        """None: the whole state is in RAM."""
        self.counts = counts
        self._host = host
        self._slots = slots
        self._gradients = gradients
        self.contents: list[int | None] = [None] * len(slots)
        """By slot: the block that is there, or will be."""
        self._staging = 0
        self.update_at_once: Updater | None = None
        """Set by an optimizer that updates a block as soon as its gradient is complete."""
        self._visit_names: dict[tuple[int, int], int] = {}
        self._new_name = itertools.count()

    # -- copies and drives ----------------------------------------------------------------------------------

    def name_visit(self, block: int, micro_batch: int) -> int:
        """Return a name for what a new visit saves; the program's copies of it mean the newest visit."""
        self._visit_names[block, micro_batch] = next(self._new_name)
        return self._visit_names[block, micro_batch]

    def forget_slots(self) -> None:
        """Take note that what the slots hold is out of date, and let lanes that check know it."""
        for slot, block in enumerate(self.contents):
            if block is not None:
                self._poison(block, slot)
        self.contents = [None] * len(self._slots)

    def _poison(self, block: int, slot: int) -> None:
        place = self._slots.place(block, slot)
        self.lanes.enqueue(Lane.FETCH, lambda: self.lanes.freed(place), writes=[weights_buffer(block, slot)])

    def _issue(self, operation: Operation) -> None:
        key = self._visit_names.get((operation.block, operation.micro_batch), -1)
        match operation.kind:
            case Kind.FETCH:
                if operation.slot >= 0:
                    self.contents[operation.slot] = operation.block
                source = self._host.blocks[operation.block].working
                if operation.page >= 0:
                    assert self.drives is not None
                    source = self.drives.page(operation)
                target = self._slots.target(operation)
                self._enqueue(operation, lambda: target.copy_(source, non_blocking=True))
                self.counts.fetches += operation.slot >= 0
                self.counts.fetch_bytes += operation.nbytes
            case Kind.LOAD:
                if self._gradients.homes[operation.block] is Home.WAITING:
                    operation = replace(operation, waiting=operation.block, nbytes=0)
                self._enqueue(operation, self._gradients.load(operation))
                self.counts.fetch_bytes += operation.nbytes
            case Kind.HOLD:
                self._enqueue(operation, lambda: self._gradients.hold(operation))
                self._gradients.settle(operation)
            case Kind.OFFLOAD if operation.is_held:
                self._enqueue(operation, lambda: self._gradients.take_home(operation))
                self.counts.offloads += operation.waiting >= 0
                self.counts.offload_bytes += operation.nbytes
            case Kind.OFFLOAD:
                self._enqueue(operation, lambda: self._gradients.offload(operation))
                self._gradients.settle(operation)
                self.counts.offloads += operation.gradient_buffer >= 0
                self.counts.offload_bytes += operation.nbytes
            case Kind.UPDATE:
                assert self.update_at_once is not None
                self.run_on_host(operation, self.update_at_once(operation))
                self._gradients.settle_update(operation.block)
                if self.drives is not None:
                    self.drives.settle_update(operation.block)
                self._staging = (operation.staging + 1) % max(1, self._gradients.buffers.num_staging)
            case Kind.READ | Kind.PAGE | Kind.WRITE:
                assert self.drives is not None
                self.enqueue(operation, self.drives.work(operation))
            case Kind.SAVE:
                self.offloaded.flush(key)
            case Kind.STOW:
                what = f"block {operation.block} in micro-batch {operation.micro_batch} of its round"
                self.offloaded.stow(key, what)
            case Kind.RECALL:
                self.offloaded.recall(key)
            case Kind.RESTORE:
                self.offloaded.prefetch(key)
            case _:
                raise AssertionError(f"{operation} is no copy and no update")

    def enqueue(self, operation: Operation, function: Callable[[], object]) -> None:
        """Enqueue an operation of the drives, and count its bytes."""
        self.counts.drive_read_bytes += operation.nbytes if operation.kind in (Kind.READ, Kind.PAGE) else 0
        self.counts.drive_write_bytes += operation.nbytes if operation.kind is Kind.WRITE else 0
        self._enqueue(operation, function)

    def _enqueue(self, operation: Operation, function: Callable[[], object]) -> None:
        self.lanes.enqueue(
            operation.lane,
            function,
            reads=operation.reads,
            writes=operation.writes,
            work=operation.nbytes,
            label=str(operation),
        )

    # -- updates --------------------------------------------------------------------------------------------

    def run_on_host(self, operation: Operation, function: Callable[[], object]) -> None:
        """Run the norm, or one block's update, in the host lane."""
        self.counts.update_bytes += operation.nbytes
        self._enqueue(operation, function)

    def round_on_host(self, block: int) -> None:
        """Complete the gradient of a block whose rounds have added up on the host."""
        self.lanes.enqueue(
            Lane.HOST,
            lambda: self._gradients.complete_on_host(block),
            reads=[("gradient", block)],
            writes=[("gradient", block), ("squares", block)],
            work=10 * self._host.layouts[block].num_state,
            label=f"round     b{block}",
        )
        self._gradients.settle_on_host(block)

    def round_on_device(self, block: int) -> None:
        """Complete the gradient of a block that is updated on the device."""
        self.lanes.enqueue(
            Lane.OFFLOAD,
            lambda: self._gradients.round_on_device(block),
            reads=[("resident_gradient", block)],
            writes=[("resident_gradient", block), ("squares", block)],
            label=f"round     b{block}",
        )

    def run_update(
        self, operation: Operation, on_host: Callable[[], object], on_device: Callable[[], object]
    ) -> None:
        """Update a block where its state is; other operations between updates are copies."""
        block = operation.block
        if operation.kind is not Kind.UPDATE:
            self._issue(operation)
            return
        if block not in self.states.blocks:
            self.run_on_host(operation, on_host)
            if self.drives is not None:
                self.drives.settle_update(block)
            return
        self.lanes.enqueue(
            Lane.HOST,
            on_device,
            reads=[("resident_gradient", block), ("norm", 0)],
            writes=[("resident", block), ("device_moments", block)],
            label=str(operation),
        )
        self.states.settle_update(block)

    def drop_gradients(self, blocks: Iterable[int]) -> None:
        """Give the gradient plane's memory back once it has been used up."""
        self.lanes.enqueue(
            Lane.HOST, self._host.drop_gradients, writes=[("gradient", block) for block in blocks]
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

    def sync(self) -> None:
        """Wait for every update, and bring home what is newer on the device: the host state is whole."""
        self.states.push()
        blocks = range(len(self._host.layouts))
        whole = [(plane, block) for plane in ("working", "moments", "gradient", "drive") for block in blocks]
        with self.touching(reads=whole):
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
