"""Executes programs: issues their copies, and holds the model's visits against them.

The model decides what is visited; the program has foreseen it. A visit that the program did not foresee (a
skipped layer, two forwards before one backward) is still exact: the rest of the program is dropped, that
visit gets a program of its own, and the order seen in one round is what is foreseen for the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.plan.program.buffers import Buffer, weights_buffer
from megatrain.plan.program.features.drives import commit_program
from megatrain.plan.program.features.roles import BlockPass
from megatrain.plan.program.features.updates import AtOnce
from megatrain.plan.program.features.weights import fetch_residents
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation
from megatrain.plan.program.spec import StepSpec
from megatrain.plan.program.step import (
    around_drives,
    complete_program,
    offload_of_sum,
    sync_program,
    update_program,
)
from megatrain.plan.program.visits import Visit, bare_visit
from megatrain.store.precision import Precision
from megatrain.stream.execute.block_visit import BETWEEN, BlockVisit
from megatrain.stream.execute.compute_work import ComputeWork
from megatrain.stream.execute.foresight import Foresight
from megatrain.stream.execute.gradient_buffers import Home
from megatrain.stream.execute.parts import EngineParts, OptimizerWork
from megatrain.stream.ranks.given_up import GivenUp

_log = logging.getLogger(__name__)


class Executor:
    """Runs operations in program order as the model goes along; one block is open at a time."""

    def __init__(self, parts: EngineParts, spec: StepSpec) -> None:
        """Start with outer blocks out of date; `spec` decides the programs."""
        self.parts = parts
        self.lanes, self.host, self.slots = parts.lanes, parts.host, parts.slots
        self.gradients, self.states, self.drives = parts.gradients, parts.states, parts.drives
        self.counts, self.integrity = parts.counts, parts.integrity
        self._weights, self._activations = parts.weights, parts.activations
        self.spec = spec
        self._outer = [weights_buffer(block, -1) for block in spec.outer]
        self._outer_blocks = frozenset(spec.outer)
        self._ends = {*spec.ends.embeddings, *spec.ends.heads}
        self._foresight = Foresight()
        self._ring = 0
        self._forget_weights()
        self._surprised = False
        self._keeps_order = False
        """What ranks do together has been issued in the order of the step up to the next visit."""
        self.open_visit: BlockVisit | None = None
        self.is_rounded = False
        """Gradients are rounded when the round ends that is going on."""
        self.work: ComputeWork | None = None
        """What visits compute, for the record and for lanes that keep to a rate."""
        self._is_between = False
        """Compute works on outer blocks: embedding, head and loss, between two visits."""
        self._pinned: list[BlockVisit] = []
        """Recomputed fragments that wait for their backward, in the order in which they ran again."""
        self.seen: list[Visit] = []

    @property
    def contents(self) -> list[int | None]:
        """By slot: the block that is there, or will be."""
        return self._weights.contents

    @property
    def is_immediate(self) -> bool:
        """Whether a block is updated as soon as its gradient is complete."""
        return self.parts.optimizer is not None

    # -- a pass of the model --------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Make compute wait for the weights that are in use during a whole pass."""
        self.integrity.check()
        self.run(self.states.pulls())
        self._advance()
        if stale := self._weights.stale:  # no program has foreseen this pass
            fetches = fetch_residents(self.spec.sizes, sorted(stale))
            self.run(around_drives(self.spec, fetches))
        self._outer_work()  # of a backward that failed before it reached a block
        self._end_between()
        self.lanes.begin(Lane.COMPUTE, reads=self._outer, label=BETWEEN)
        self._is_between = True

    def end_pass(self) -> None:
        """Mark the end of a use of these weights."""
        visit, heads = self.open_visit, self.spec.ends.heads
        if visit is not None and visit.block in heads and not visit.operation.is_backward:
            self.close()
        self._is_between = False
        self.lanes.end(Lane.COMPUTE, reads=self._outer, work=self._outer_work())

    def begin_between(self) -> None:
        """Take note that what compute does from now on is no visit, but work on outer blocks."""
        if not self._is_between and self.open_visit is None:
            self.lanes.begin_span(Lane.COMPUTE, BETWEEN)
            self._is_between = True

    def end_head(self) -> None:
        """Take note that the head of a micro-batch has gone back: what follows is other work."""
        self._end_between()
        self.begin_between()

    def _end_between(self) -> None:
        if self._is_between:
            self._is_between = False
            work = self.work
            self.lanes.end_span(Lane.COMPUTE, work=0.0 if work is None else work.take_outer())

    def _outer_work(self) -> float:
        return 0.0 if self.work is None else self.work.take_outer()

    def foresee(self, visits: Sequence[Visit], *, is_whole: bool = True, of_all: bool = False) -> None:
        """Plan the copies for visits to come, from what the slots hold now; the first visit issues them.

        Args:
            visits: The visits in their order; the sequence is not changed afterwards.
            is_whole: A claim that they are all visits of a step that there will be, so complete gradients may
                be used at once.
            of_all: A claim that all ranks make the visits, and gather weights: what one alone has fetched is
                forgotten.
        """
        self._flush_ring()
        if of_all and self.spec.gathers:
            self._forget_weights()
        self._foresight.foresee(
            self.spec,
            visits,
            self.contents,
            fetches_outer=bool(self._weights.stale),
            first_gradient_buffer=self._ring,
            pinned={visit.operation.slot for visit in self._pinned} - {-1},
            at_once=self._at_once() if is_whole else None,
            gathers=of_all,
        )
        self.seen = []
        self._keeps_order = of_all

    def _at_once(self) -> AtOnce | None:
        """Return the way of gradients to updates that follow at once; None: none do."""
        if not self.is_immediate:
            return None
        gradients, buffers = self.gradients, self.gradients.buffers
        return AtOnce(buffers.num_staging if buffers.is_staged else 0, gradients.next_staging)

    def open(self, visit: BlockVisit, *, is_backward: bool, is_again: bool) -> None:
        """Open a visit: compute may read the block's weights, where its operation now says they are.

        Args:
            visit: The visit, which says what is visited, and for whom.
            is_backward: A claim that autograd visits the block.
            is_again: A claim that a forward that was run before runs again.
        """
        if self._pinned or self.open_visit is not None:
            self._pass_untrained(visit.call)
        self._open(visit, is_backward=is_backward, is_again=is_again)

    def _open(self, visit: BlockVisit, *, is_backward: bool, is_again: bool = False) -> None:
        assert self.open_visit is None, f"block {visit.block} entered while {self.open_visit} is open"
        if self.integrity.cause is not None:
            self.integrity.check()
        if self.gradients.shared.ranks.have_given_up:
            raise GivenUp
        if self._is_between:
            self._end_between()
        operation = self._foresight.next
        if operation is None or operation.block in self._outer_blocks:
            self._advance()
            operation = self._foresight.next
        if operation is None or not self._matches(operation, visit, is_backward):
            operation = self._improvise(visit, is_backward, had_plan=not self._foresight.is_empty)
        self._foresight.take()
        self.seen.append(bare_visit(visit.block, is_backward, visit.micro_batch))
        if self._pinned and visit in self._pinned:
            self._pinned.remove(visit)
            assert visit.operation.slot == operation.slot, "a pinned fragment has moved"
        visit.operation, visit.place = operation, self.slots.place(operation.block, operation.slot)
        visit.is_again = is_again
        self.lanes.begin(Lane.COMPUTE, reads=operation.touched()[0], label=operation)
        self.open_visit = visit

    def _pass_untrained(self, call: object | None) -> None:
        """Visit what autograd has passed unseen: fragments without trained parameters, of another call."""
        if self.open_visit is not None and self.open_visit.operation.is_backward:
            self.close()
        passed = [v for v in reversed(self._pinned) if v.call is not call and not (v.waits and call)]
        for visit in passed:
            self._open(visit, is_backward=True)
            self.close()

    def close(self, grads: Sequence[Tensor | None] | None = None, *, pins: bool = False) -> None:
        """Close the open visit; issue the copies that this allows.

        Args:
            grads: The gradients of a backward; None: autograd reached the block but none of its parameters.
            pins: A claim that the block, a recomputed fragment, keeps its slot until its backward: saved
                tensors point into it.
        """
        visit = self.open_visit
        assert visit is not None
        operation = visit.operation
        self.lanes.end(Lane.COMPUTE, reads=operation.touched()[0], work=self._work_of_visit(visit))
        if operation.is_backward and self.spec.sizes[operation.block].is_trained:
            self._take(operation, grads)
        self.open_visit = visit.place = None
        self._advance()
        if not self._is_between:
            self.begin_between()
        if pins:
            self._pinned.append(visit)
            self.seen[-1] = bare_visit(
                visit.block, is_backward=False, micro_batch=visit.micro_batch, stays=True
            )

    def _work_of_visit(self, visit: BlockVisit) -> float:
        if self.work is None or visit.block in self._ends:
            return self._outer_work()
        return self.work.of(visit.operation, is_again=visit.is_again)

    def end_backward(self) -> None:
        """Close what a backward left open: a block none of whose parameters wanted a gradient."""
        self._pass_untrained(None)
        if self.open_visit is not None:
            self.close()
        self._pinned.clear()
        self.gradients.leave_residents()
        self._advance(ends_round=True)
        self._activations.sweep()
        self.end_pass()

    def take_seen(self) -> list[Visit]:
        """Return the visits since the last call."""
        seen, self.seen = self.seen, []
        return seen

    # -- the end of a step ----------------------------------------------------------------------------------

    def complete_gradients(self, *, leave: Collection[int] = ()) -> None:
        """Send home, and round, every gradient of the step that is not there yet; nothing is waited for.

        Args:
            leave: Resident blocks whose gradients are wanted on the device.
        """
        self._flush_ring()
        self.run(
            complete_program(
                self.spec,
                [block for block in self.gradients.still_at(Home.DEVICE) if block not in leave],
                self.gradients.still_at(Home.ACCUMULATOR),
                self.gradients.still_at(Home.PARKED_SUM),
                at_once=self._at_once(),
            )
        )

    def update(self, work: OptimizerWork) -> None:
        """Run the end of a step: the norm of its gradients, which are complete, and the updates."""
        blocks = self.gradients.blocks
        program = self._foresight.end(
            update_program,
            self.spec,
            blocks,
            [block for block in blocks if self.gradients.homes[block] is Home.UPDATED],
            self.gradients.held(blocks, leave=self.states.blocks),
            self.gradients.parked,
        )
        at_once, self.parts.optimizer = self.parts.optimizer, work
        try:
            with self.integrity.step():
                self.run(program)
        finally:
            self.parts.optimizer = at_once

    def sync(self) -> None:
        """Wait for every update, and bring home what is newer on the device: the host state is whole."""
        self.run(self._foresight.end(sync_program, self.spec, self.states.take_newer()))

    def commit(
        self, step: int, meta: Mapping[str, Any], finish: Callable[[], Mapping[str, Any]] | None
    ) -> None:
        """Enqueue a commit of the state after all updates that were enqueued before; see `Engine.commit`."""
        self.integrity.check()
        self.run(commit_program(self.spec, self.drives.begin_commit(step, meta, finish)))

    def wait_for_gradients(self) -> None:
        """Let the caller read the gradients, at home or where they wait; what adds up may go on adding up."""
        kinds = ["gradient"]
        if self.gradients.buffers.waits:
            self._flush_ring()
            kinds += ["waiting", "resident_gradient", "parked"]
        else:
            self.complete_gradients()
        self.wait([(kind, block) for kind in kinds for block in self.gradients.blocks])

    def wait_for_norm(self) -> None:
        """Block until the last step's norm is known; raises what kept it from that."""
        self.wait([("norm", 0)])

    def invalidate(self) -> None:
        """Forget what the device holds: the host has, or will have, new weights."""
        assert self.open_visit is None
        self._forget_weights()
        self._foresight.forget()
        self._ring = self.gradients.next_staging = 0

    def _forget_weights(self) -> None:
        sizes = self.spec.sizes
        self._weights.forget(block for block in self.spec.outer if not sizes[block].updates_on_device)

    @property
    def can_go_through(self) -> bool:
        """Whether `go_through` can do what is left of the step."""
        return self._keeps_order and not (self.integrity.has_failed or self.is_immediate)

    def go_through(self) -> None:
        """Do what is left of a step that ranks do together, with whatever values, so that nobody waits.

        Gradients, and what the device holds of weights, are of no use then: `abandon` follows.
        """
        self._leave_visit()
        with torch.no_grad():
            self.run(self._foresight.left_together())

    def abandon(self, error: BaseException | None = None) -> None:
        """Drop an unfinished round after an exception."""
        if self.integrity.has_failed:
            self.states.doubt()
        self.integrity.drop(error)
        self._leave_visit()
        self._foresight.forget()
        self._activations.clear()
        self._weights.empty()  # a copy may be what failed
        self._forget_weights()

    def _leave_visit(self) -> None:
        """End what compute was at."""
        self._outer_work()
        self._end_between()
        if self.open_visit is not None:
            self.lanes.end(Lane.COMPUTE, reads=self.open_visit.operation.reads)
        self.open_visit = None
        self._pinned.clear()

    # -- operations -----------------------------------------------------------------------------------------

    def run(self, operations: Iterable[Operation]) -> None:
        """Issue operations in order, no visits among them."""
        for operation in operations:
            self.issue(operation)

    def issue(self, operation: Operation) -> None:
        """Enqueue one operation in its lane, and note what it leaves; one of the caller's lane is waited for.

        Raises:
            TornStateError: An update has failed before.
        """
        if self.integrity.cause is not None:
            self.integrity.check()
        parts = self.parts
        for found in (operation,) if operation.is_fixed else operation.begin(parts):
            reads, writes = found.touched()
            if found.lane is Lane.CALLER:
                self.wait(reads)
                continue
            work = found.work(parts)
            if found.changes:
                work = getattr(self.integrity, found.changes)(work)
                if found.changes_home:
                    work = parts.guard.before(found.block, work)
            self.lanes.enqueue(found.lane, work, reads=reads, writes=writes, work=found.nbytes, label=found)
            found.settle(parts)
            if found.moves:
                vars(parts.counts)[found.moves] += found.nbytes

    def wait(self, reads: Sequence[Buffer]) -> None:
        """Block until what was enqueued has written these buffers; raises what kept it from that."""
        self.integrity.check()
        with self.lanes.using(Lane.CALLER, reads=reads):
            pass

    # -- visits ---------------------------------------------------------------------------------------------

    def _take(self, operation: BlockPass, grads: Sequence[Tensor | None] | None) -> None:
        """Add a backward's gradients up, if there are any."""
        block, is_last, gradients = operation.block, operation.visit.is_last, self.gradients
        ring = operation.gradient_buffer
        if ring < 0:
            if grads is not None and any(grad is not None for grad in grads):
                self.gradients.collect_resident(block, operation.micro_batch, grads)
            if is_last and operation.visit.sums.exchanges:
                self.gradients.leave_round(block)
            return
        if grads is not None:
            self.gradients.collect(operation, grads)
        if is_last and gradients.has_runs:
            self.gradients.leave_round(block, ring)
        if is_last:
            self._ring = (ring + 1) % gradients.buffers.num_buffers
            if not gradients.is_filled[ring]:
                self._foresight.drop_ends(block)

    def _matches(self, operation: BlockPass, visit: BlockVisit, is_backward: bool) -> bool:
        foreseen = (operation.block, operation.visit.micro_batch, operation.is_backward)
        if foreseen != (visit.block, visit.micro_batch, is_backward):
            return False
        size = self.spec.sizes[visit.block]
        if not is_backward or not size.is_trained or not size.is_streamed:
            return True
        return operation.visit.loads == self.gradients.has(visit.block)

    def _improvise(self, visit: BlockVisit, is_backward: bool, *, had_plan: bool) -> BlockPass:
        block, seen, heads = visit.block, self.seen, self.spec.ends.heads
        if (is_backward and self.gradients.has_runs) or self._foresight.gathers:
            has_chunks = any(layer.num_chunks for layer in self.spec.layers)
            raise ModelError(
                f"block {block} is passed in an order that was not foreseen, so it is not known how its "
                "gradients add up in runs, and when ranks gather it; use "
                f"{'expert_chunks=1, or ' if has_chunks else ''}one rank and parallel.shards=1"
            )
        if had_plan and not self._surprised:
            self._surprised = True
            _log.debug("block %d is visited out of the foreseen order; copies go on without foresight", block)
        self._flush_ring()
        loads = is_backward and self.spec.sizes[block].is_streamed and self.gradients.has(block)
        # a head's gradient may come in parts, so it is wider than a complete one after one backward
        keeps = is_backward and block in heads and not self.is_rounded
        wide = (loads or keeps) and self.host.precision is Precision.BF16
        if is_backward and self.is_immediate:
            if self.gradients.homes[block] is Home.UPDATED:
                raise ModelError(
                    f"updates=immediate: block {block} was updated, and then its backward was visited again; "
                    "the model passes it in an order of its own: use updates=deferred"
                )
            self.gradients.buffers.num_staging = 0
        if loads or wide or (is_backward and self.is_immediate):
            self.gradients.prepare(adds_up=loads or wide, num_rounds=2)
        unforeseen = Visit(
            block, is_backward, visit.micro_batch, loads=loads, completes=not wide, is_head=block in heads
        )
        self.foresee([unforeseen], is_whole=False)
        self.seen = seen
        self._advance()
        operation = self._foresight.next
        assert operation is not None
        return operation

    def _flush_ring(self) -> None:
        """Send home sums whose round did not end as foreseen; later visits load them. Drops the program."""
        unfinished = self._foresight.drop_copies(self.gradients.is_filled)
        if unfinished:
            self.gradients.prepare(adds_up=True, num_rounds=2)
        for operation in unfinished:
            if self.gradients.is_filled[operation.gradient_buffer]:
                self.run(offload_of_sum(self.spec, operation))

    def _advance(self, *, ends_round: bool = False) -> None:
        """Issue the copies before the next visit of a layer; work on outer blocks needs none of its own."""
        keeps_order, self._keeps_order = self._keeps_order, False
        for operation in self._foresight.before_visit(self.spec.outer, ends_round=ends_round):
            self.issue(operation)
        self._keeps_order = keeps_order
