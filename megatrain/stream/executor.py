"""Executes programs: issues their copies, and holds the model's visits against them.

The model decides what is visited; the program has foreseen it. A visit that the program did not foresee (a
skipped layer, two forwards before one backward) is still exact: the rest of the program is dropped, that
visit gets a program of its own, and the order seen in one round is what is foreseen for the next.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from megatrain.plan.program import (
    BlockSize,
    Kind,
    Lane,
    Operation,
    Visit,
    fetch_residents,
    offload_residents,
    schedule,
    weights_buffer,
)
from megatrain.store.state import HostState, Precision
from megatrain.stream.gradients import Gradients, Home
from megatrain.stream.lanes import Lanes
from megatrain.stream.slots import Slots

_log = logging.getLogger(__name__)

_VISITS = (Kind.FORWARD, Kind.BACKWARD)


class Executor:
    """Runs operations in program order as the model goes along; one streamed block is open at a time."""

    def __init__(
        self, lanes: Lanes, host: HostState, sizes: Sequence[BlockSize], slots: Slots, gradients: Gradients
    ) -> None:
        """Start with empty slots and stale resident blocks."""
        self.lanes = lanes
        self._host = host
        self.sizes = list(sizes)
        self._slots = slots
        self._gradients = gradients
        self.contents: list[int | None] = [None] * len(slots)
        self._pending: deque[Operation] = deque()
        self._ring = 0
        self._stale_residents = True
        self._surprised = False
        self.open_visit: Operation | None = None
        self.fetched_bytes = 0
        self.offloaded_bytes = 0
        self.seen: list[Visit] = []

    @property
    def _residents(self) -> list[tuple[str, int]]:
        return [weights_buffer(block, -1) for block, size in enumerate(self.sizes) if not size.is_streamed]

    def refresh_residents(self) -> None:
        """Bring resident blocks' new weights to the device if an update has made theirs stale."""
        if self._stale_residents:
            for operation in fetch_residents(self.sizes):
                self._issue(operation)
            self._stale_residents = False

    def prepare_gradients(self, *, accumulates: bool) -> None:
        """Make room for a step's gradients; nobody may be using the ring."""
        ring = [("gradient_buffer", index) for index in range(self._gradients.num_buffers)]
        self.lanes.begin(Lane.HOST, writes=ring)
        self._gradients.prepare(accumulates=accumulates)
        self.lanes.end(Lane.HOST, writes=ring)

    def begin_pass(self) -> None:
        """Make compute wait for the resident weights."""
        self.refresh_residents()
        self.lanes.begin(Lane.COMPUTE, reads=self._residents)

    def end_pass(self) -> None:
        """Mark the end of a use of the resident weights."""
        self.lanes.end(Lane.COMPUTE, reads=self._residents)

    def foresee(self, visits: Iterable[Visit]) -> None:
        """Plan the copies for visits to come, from what the slots hold now, and issue the first ones."""
        program = schedule(
            list(visits),
            self.sizes,
            self.contents,
            num_gradient_buffers=self._gradients.num_buffers,
            first_gradient_buffer=self._ring,
        )
        self._pending = deque(program.operations)
        self.seen = []

    def open(self, block: int, *, is_backward: bool) -> Tensor:
        """Begin a visit: returns the block's working bytes on the device once compute may read them."""
        if self.open_visit is not None and self.open_visit.kind is Kind.BACKWARD:
            self.close()  # autograd passed a block without trained parameters: nothing else ends its visit
        assert self.open_visit is None, f"block {block} entered while {self.open_visit} is open"
        self._advance()
        operation = self._pending[0] if self._pending else None
        if operation is None or not self._matches(operation, block, is_backward):
            operation = self._improvise(block, is_backward, had_plan=operation is not None)
        self._pending.popleft()
        self.seen.append(Visit(block, is_backward))
        self.lanes.begin(Lane.COMPUTE, reads=operation.reads)
        self.open_visit = operation
        return self._slots.target(operation)

    def close(self, grads: Sequence[Tensor | None] | None = None) -> None:
        """End the open visit, with the gradients of a backward; issue the copies that this allows."""
        operation = self.open_visit
        assert operation is not None
        self.lanes.end(Lane.COMPUTE, reads=operation.reads)
        if operation.kind is Kind.BACKWARD and operation.gradient_buffer >= 0:
            if grads is None:  # autograd reached the block but none of its parameters
                self._skip_gradient(operation)
            else:
                self.lanes.begin(Lane.COMPUTE, writes=operation.writes)
                self._gradients.collect(operation, grads)
                self.lanes.end(Lane.COMPUTE, writes=operation.writes)
                self._ring = (operation.gradient_buffer + 1) % self._gradients.num_buffers
        self.open_visit = None
        self._advance()

    def collect_resident(self, block: int, grads: Sequence[Tensor | None]) -> None:
        """Take one backward's gradients of a resident block."""
        buffer = [("resident_gradient", block)]
        self.lanes.begin(Lane.COMPUTE, writes=buffer)
        self._gradients.collect_resident(block, grads)
        self.lanes.end(Lane.COMPUTE, writes=buffer)

    def take_gradients_home(self) -> None:
        """Complete every gradient of the step in the gradient plane, and wait until all are there."""
        for operation in offload_residents(self.sizes, self._gradients.still_at(Home.DEVICE)):
            self._issue(operation)
        for block in self._gradients.still_at(Home.ACCUMULATOR):
            buffer = [("gradient", block)]
            self.lanes.begin(Lane.HOST, reads=buffer, writes=buffer)
            self._gradients.complete_on_host(block)
            self.lanes.end(Lane.HOST, writes=buffer)
        home = [("gradient", block) for block in self._gradients.blocks]
        self.lanes.begin(Lane.HOST, reads=home)
        self.lanes.end(Lane.HOST, reads=home)

    def run_on_host(self, operation: Operation, function: Callable[[], object]) -> None:
        """Run the norm, or one block's update, in the host lane."""
        self._enqueue(operation, function)

    def end_backward(self) -> None:
        """Close what a backward left open: a block none of whose parameters wanted a gradient."""
        if self.open_visit is not None:
            self.close()
        self.end_pass()

    def take_seen(self) -> list[Visit]:
        """Return the visits since the last call."""
        seen, self.seen = self.seen, []
        return seen

    def invalidate(self) -> None:
        """Forget what the device holds: the host has new weights."""
        assert self.open_visit is None
        for slot, block in enumerate(self.contents):
            if block is not None:
                buffer = [weights_buffer(block, slot)]
                self.lanes.begin(Lane.HOST, reads=buffer, writes=buffer)
                self.lanes.freed(self._slots.place(block, slot))
                self.lanes.end(Lane.HOST, writes=buffer)
        self.contents = [None] * len(self._slots)
        self._pending.clear()
        self._stale_residents = True

    def abandon(self) -> None:
        """Drop an unfinished round after an exception."""
        if self.open_visit is not None:
            self.lanes.end(Lane.COMPUTE, reads=self.open_visit.reads)
        self.open_visit = None
        self._pending.clear()
        self.contents = [None] * len(self._slots)  # a copy may be what failed
        self._stale_residents = True

    def _matches(self, operation: Operation, block: int, is_backward: bool) -> bool:
        if operation.block != block or (operation.kind is Kind.BACKWARD) != is_backward:
            return False
        return not is_backward or not self._is_trained(block) or operation.loads == self._gradients.has(block)

    def _is_trained(self, block: int) -> bool:
        return self.sizes[block].is_trained

    def _improvise(self, block: int, is_backward: bool, *, had_plan: bool) -> Operation:
        if had_plan and not self._surprised:
            self._surprised = True
            _log.info("block %d is visited out of the foreseen order; copies go on without foresight", block)
        loads = is_backward and self._gradients.has(block)
        wide = loads and self._host.precision is Precision.BF16
        if wide:
            self.prepare_gradients(accumulates=True)
        seen = self.seen
        self.foresee([Visit(block, is_backward, loads=loads, completes=not wide)])
        self.seen = seen
        self._advance()
        return self._pending[0]

    def _skip_gradient(self, operation: Operation) -> None:
        while (
            self._pending
            and self._pending[0].kind is Kind.OFFLOAD
            and self._pending[0].block == operation.block
        ):
            self._pending.popleft()

    def _advance(self) -> None:
        while self._pending and self._pending[0].kind not in _VISITS:
            self._issue(self._pending.popleft())

    def _issue(self, operation: Operation) -> None:
        match operation.kind:
            case Kind.FETCH:
                if operation.slot >= 0:
                    self.contents[operation.slot] = operation.block
                source = self._host.blocks[operation.block].working
                target = self._slots.target(operation)
                self._enqueue(operation, lambda: target.copy_(source, non_blocking=True))
                self.fetched_bytes += operation.nbytes
            case Kind.LOAD:
                self._enqueue(operation, lambda: self._gradients.load(operation))
                self.fetched_bytes += operation.nbytes
            case Kind.OFFLOAD:
                self._enqueue(operation, lambda: self._gradients.offload(operation))
                self._gradients.settle(operation)
                self.offloaded_bytes += operation.nbytes
            case _:
                raise AssertionError(f"{operation} is not a copy")

    def _enqueue(self, operation: Operation, function: Callable[[], object]) -> None:
        self.lanes.enqueue(
            operation.lane,
            function,
            reads=operation.reads,
            writes=operation.writes,
            nbytes=operation.nbytes,
        )
