"""Issues single operations: what each of them runs, in which lane, and the bytes that it moves.

Nothing here knows in which order operations come: a program says that, and the `Executor` follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from megatrain.config.runs import Runs, StepSums, SumRoom
from megatrain.plan.program.block_size import BlockSize
from megatrain.plan.program.buffers import Buffer, gradients_buffer, weights_buffer
from megatrain.plan.program.kinds import Kind, Lane
from megatrain.plan.program.operations import Operation
from megatrain.plan.program.schedule import unparked
from megatrain.store.state import HostState, Precision
from megatrain.stream.execute.gradient_buffers import Home
from megatrain.stream.execute.gradients import Gradients
from megatrain.stream.execute.resident_state import DeviceStates
from megatrain.stream.execute.slots import Slots
from megatrain.stream.execute.state_on_drives import StateOnDrives
from megatrain.stream.execute.wholeness import Wholeness
from megatrain.stream.lanes import Lanes

Work: TypeAlias = Callable[[Operation], Callable[[], object]]
"""Returns what a NORM or an UPDATE runs, made at the moment when it is issued."""


_ACTIVATIONS = (Kind.SAVE, Kind.STOW, Kind.RECALL, Kind.RESTORE)


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
        wholeness: Wholeness,
        drives: StateOnDrives | None,
    ) -> None:
        """Start with empty slots."""
        self.lanes = lanes
        self.wholeness = wholeness
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
        """Enqueue one operation, and note what it leaves.

        Raises:
            TornStateError: An update has failed before.
        """
        self.wholeness.check()
        if operation.kind in _ACTIVATIONS:
            self._activations.copy(operation)
            return
        if operation.kind is Kind.SYNC:
            with self.touching(reads=operation.reads):
                return
        if operation.kind is Kind.UNPARK and not self.gradients.is_parked(operation):
            return
        if operation.kind is Kind.LOAD:
            if not self.gradients.has(operation.block):
                return  # its backwards so far have brought none: what is there is of an earlier step
            operation = self._found(operation)
        self.lanes.enqueue(
            operation.lane,
            self._counted(operation, self._work_of(operation, work_of or self.update_at_once)),
            reads=operation.reads,
            writes=operation.writes,
            work=operation.nbytes,
            label=operation,
        )
        self._settle(operation)

    def _found(self, load: Operation) -> Operation:
        """Return the copy of a sum from where its gradient is: it was taken for complete, and waits."""
        home, block = self.gradients.homes[load.block], load.block
        if home is Home.WAITING:
            return replace(load, waiting=block, staging=-1, nbytes=0)
        if home in (Home.GRADIENT, Home.ACCUMULATOR):
            return replace(load, staging=-1)
        if home is Home.PARKED and (load.staging < 0 or self.host.precision is Precision.BF16):
            size = BlockSize.of(
                self.host.layouts[block].sizes, is_streamed=True, on_device=False, moments=self.host.moments
            )
            staging = max(load.staging, 0)
            self.issue(unparked(block, size, staging))
            return replace(load, staging=staging, nbytes=size.offload_bytes)
        return load

    def _work_of(self, operation: Operation, work_of: Work | None) -> Callable[[], object]:
        """Return what an operation does in its lane."""
        gradients, block = self.gradients, operation.block
        match operation.kind:
            case Kind.FETCH:
                source = self.host.blocks[block].working if operation.page < 0 else self._page(operation)
                target = self._slots.target(operation)
                if operation.is_share:
                    return partial(self._fetch_piece, target, source)
                return lambda: self.lanes.copy(target, source)
            case Kind.GATHER:
                assert gradients.shared is not None
                return partial(gradients.shared.gather, self._slots.target(operation))
            case Kind.LOAD:
                return gradients.load(operation)
            case Kind.HOLD:
                return lambda: gradients.hold(operation)
            case Kind.OFFLOAD if operation.is_held:
                return lambda: gradients.take_home(operation)
            case Kind.OFFLOAD:
                return lambda: gradients.offload(operation)
            case Kind.EXCHANGE:
                return gradients.exchange(operation)
            case Kind.SPREAD if operation.on_device:
                assert gradients.shared is not None
                return partial(gradients.shared.gather_shares, block, self._slots.target(operation))
            case Kind.SPREAD:
                assert gradients.shared is not None
                working = self.host.blocks[block].working
                if self.drives is not None:
                    working = self.drives.working(operation)
                return partial(gradients.shared.spread, block, working)
            case Kind.PARK:
                return gradients.buffers.park(operation, is_sum=gradients.stays_wide(operation))
            case Kind.UNPARK:
                return gradients.buffers.unpark(operation, is_sum=gradients.stays_wide(operation))
            case Kind.ADD:
                return gradients.add(operation)
            case Kind.ROUND if operation.on_device:
                return lambda: gradients.round_on_device(block)
            case Kind.ROUND:
                return lambda: gradients.complete_on_host(operation)
            case Kind.NORM | Kind.UPDATE:
                assert work_of is not None
                return work_of(operation)
            case Kind.RELEASE:
                return self.host.drop_gradients
            case Kind.PULL | Kind.PUSH:
                return self.states.copy(operation)
            case _:
                assert self.drives is not None, f"{operation} is a visit: the model makes it"
                return self.drives.work(operation)

    def _fetch_piece(self, target: Tensor, source: Tensor) -> None:
        assert self.gradients.shared is not None
        for part in self.gradients.shared.pieces(target.numel()):
            self.lanes.copy(target[part], source[part])

    def _counted(self, operation: Operation, work: Callable[[], object]) -> Callable[[], object]:
        """Return the work of an operation, counted if the state is torn without it."""
        match operation.kind:
            case Kind.UPDATE:
                return self.wholeness.change(work)
            case Kind.WRITE if operation.piece < 0:  # a piece is a copy of what RAM has
                return self.wholeness.change(work)
            case Kind.PUSH:
                return self.wholeness.copy_home(work)
            case _:
                return work

    def _page(self, operation: Operation) -> Tensor:
        assert self.drives is not None
        return self.drives.page(operation)

    def _settle(self, operation: Operation) -> None:
        """Note, when an operation is enqueued, what it leaves where, and what it moves."""
        counts, block = self.counts, operation.block
        match operation.kind:
            case Kind.FETCH:
                if operation.slot >= 0:
                    self.contents[operation.slot] = block
                self._stale.discard(block)
                counts.fetches += operation.slot >= 0
                counts.fetch_bytes += operation.nbytes
            case Kind.LOAD:
                counts.fetch_bytes += operation.nbytes
            case Kind.HOLD:
                self.gradients.settle(operation)
            case Kind.OFFLOAD:
                if not operation.is_held:
                    self.gradients.settle(operation)
                counts.offloads += operation.gradient_buffer >= 0 or operation.waiting >= 0
                counts.offload_bytes += operation.nbytes
            case Kind.EXCHANGE:
                self.gradients.run_sums.summed.add(block)
                counts.exchanged_bytes += operation.nbytes
            case Kind.ADD:
                self.gradients.settle_sum(operation)
            case Kind.ROUND if not operation.on_device:
                self.gradients.settle_on_host(operation)
            case Kind.UPDATE if operation.on_device:
                self.states.settle_update(block)
            case Kind.UPDATE:
                self._settle_update(operation)
            case Kind.PARK:
                self.gradients.settle_on_drives(operation)
                counts.drive_write_bytes += operation.nbytes
            case Kind.READ | Kind.PAGE | Kind.UNPARK:
                counts.drive_read_bytes += operation.nbytes
            case Kind.WRITE:
                counts.drive_write_bytes += operation.nbytes
            case Kind.GATHER:
                counts.gathered_bytes += operation.nbytes
            case Kind.SPREAD:
                counts.spread_bytes += operation.nbytes

    def _settle_update(self, operation: Operation) -> None:
        self.counts.update_bytes += operation.nbytes
        if not operation.follows_norm:
            self.gradients.homes[operation.block] = Home.UPDATED
            self._staging = (operation.staging + 1) % max(1, self.gradients.buffers.num_staging)
        if self.drives is not None:
            self.drives.settle_update(operation.block)

    # -- gradients, within a visit -------------------------------------------------------------------------

    def take_resident(self, operation: Operation, grads: Sequence[Tensor | None] | None) -> None:
        """Take those of a backward of a resident layer; None: autograd reached none of its parameters."""
        if grads is not None and any(grad is not None for grad in grads):
            self.collect_resident(operation.block, operation.micro_batch, grads)
        if operation.is_last and operation.is_share:  # an EXCHANGE follows
            self.leave_round(operation.block)

    def collect_resident(self, block: int, micro_batch: int, grads: Sequence[Tensor | None]) -> None:
        """Take one backward's gradients of a resident block."""
        buffer = [("resident_gradient", block)]
        self.lanes.begin(Lane.COMPUTE, writes=buffer)
        self.gradients.collect_resident(block, micro_batch, grads)
        self.lanes.end(Lane.COMPUTE, writes=buffer)

    def collect_part(self, operation: Operation, grads: Sequence[Tensor | None]) -> None:
        """Take a part of the gradients of an open visit, by its operation."""
        self.lanes.begin(Lane.COMPUTE, writes=operation.writes)
        self.gradients.collect(operation, grads)
        self.lanes.end(Lane.COMPUTE, writes=operation.writes)

    def leave_round(self, block: int, gradient_buffer: int = -1) -> None:
        """Join the partial sums of a block that no later backward of the round passes."""
        buffer = [gradients_buffer(block, gradient_buffer)]
        self.lanes.begin(Lane.COMPUTE, writes=buffer)
        self.gradients.leave_round(block, gradient_buffer)
        self.lanes.end(Lane.COMPUTE, writes=buffer)

    def leave_residents(self) -> None:
        """Join the partial sums of blocks on the device: of all, where other ranks may have gradients."""
        if not self.gradients.has_runs:
            return
        are_all = self.gradients.shared is not None
        blocks = range(len(self.host.layouts)) if are_all else self.gradients.still_at(Home.DEVICE)
        for block in blocks:
            if self.gradients.buffers.is_resident(block) and block not in self.gradients.run_sums.summed:
                self.leave_round(block)

    def round_residents(self) -> None:
        """Round the sums of blocks on the device to the working dtype, as those of others are at home."""
        for block in self.gradients.still_at(Home.DEVICE):
            buffer = [gradients_buffer(block, -1)]
            self.lanes.begin(Lane.COMPUTE, writes=buffer)
            self.gradients.round_in_place(block)
            self.lanes.end(Lane.COMPUTE, writes=buffer)

    def prepare_gradients(self, *, adds_up: bool, num_rounds: int, kept: SumRoom | None = None) -> None:
        """Make room for a step's gradients; waits for whoever uses the ring only if it has to grow.

        Args:
            adds_up: As in `GradientBuffers.prepare`.
            num_rounds: As there.
            kept: As there; None: of rounds that are not foreseen together.
        """
        buffers = self.gradients.buffers
        if kept is None:
            is_wide = self.host.precision is Precision.BF16
            sums = StepSums(Runs(), (1,) * num_rounds, on_drives=buffers.sums_on_drives)
            kept = sums.between(is_wide=is_wide)
        needs: dict[str, Any] = {"adds_up": adds_up, "num_rounds": num_rounds, "kept": kept}
        if buffers.needs_room(**needs):
            with self.touching(writes=[("gradient_buffer", index) for index in range(buffers.num_buffers)]):
                buffers.prepare(**needs)

    # -- waiting --------------------------------------------------------------------------------------------

    @contextmanager
    def touching(self, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> Iterator[None]:
        """Let the launching thread use host memory, once all others are done with it."""
        self.wholeness.check()
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
        """State, weights and gradients from drives; `OffloadedActivations.drive_bytes` counts activations."""
        self.drive_write_bytes = 0
        """State and gradients to the drives, commits included."""
        self.gathered_bytes = 0
        """Of weights, got from the other ranks of the node."""
        self.exchanged_bytes = 0
        """Of sums, sent to other ranks."""
        self.spread_bytes = 0
        """Of new weights, sent to other nodes."""
        self.chunked_tokens = 0
        """Tokens that have passed the head in chunks, and pass it again in the backward."""
        self.swapped_bytes = 0
        """Given to the ranks that share out the same rows, and as many got from them."""

    def swapped(self, nbytes: int) -> None:
        """Take note of bytes that were given to them."""
        self.swapped_bytes += nbytes
