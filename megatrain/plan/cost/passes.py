"""Passes without gradients, as of an evaluation or a reference: what they take, many micro-batches together.

They run in the memory that a step's own micro-batches take, and fetch each streamed block once for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from megatrain.plan.cost.contention import Demand, Shares
from megatrain.plan.cost.pricing import Pricing
from megatrain.plan.cost.step_time import Step
from megatrain.plan.cost.timetable import Task, busy_seconds, steady_ends
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Program
from megatrain.plan.program.step import visits_program
from megatrain.plan.program.visits import pass_visits

_MOST_VISITS = 4
"""Operations of which a layer's forward is made; more micro-batches pass together in one."""


_HIDES = 8
"""The times that a group's compute should outlast its copies: more micro-batches would not be faster."""


@dataclass(frozen=True)
class Passes:
    """The passes of a step's micro-batches through the model without gradients."""

    step: Step
    """The step whose machine, model and choice these passes have."""
    together: int
    """Micro-batches that pass together, at most."""

    @classmethod
    def of(cls, step: Step, room: int) -> Passes:
        """Let as many pass together as hide their copies, but no more than there is room for.

        As many as a round of training has always fit, and pass together too.
        """
        one = cls(step, 1)
        busy = busy_seconds(one.tasks(1), link_of=step.link_of)
        compute_s = busy.pop(Lane.COMPUTE, 0.0)
        copies_s = max(busy.values(), default=0.0)
        wanted = math.ceil(_HIDES * copies_s / compute_s) if compute_s else room
        of_round = min(step.choice.lockstep, step.batch.num_micro_batches)
        return cls(step, max(of_round, min(room, wanted)))

    def seconds(self, num_micro_batches: int) -> float:
        """Return the seconds of so many, as far as full groups go, and of what is left."""
        groups, rest = divmod(num_micro_batches, self.together)
        return groups * self.group_s(self.together) + (self.group_s(rest) if rest else 0.0)

    def fetched_bytes(self, num_micro_batches: int) -> int:
        """Return the bytes that they fetch, each streamed block once for a group."""
        return -(-num_micro_batches // self.together) * self._group_bytes

    def group_s(self, num_together: int) -> float:
        """Return the seconds of so many that pass together, among many such groups."""
        spec, tasks = self.step.rates.spec, self.tasks(num_together)
        if spec.is_cpu:
            return sum(task.seconds for task in tasks)
        link_of = self.step.link_of
        ends, before = steady_ends(tasks, waits_for_compute=spec.launches_inline, link_of=link_of)
        return max(max(ends) - max(before), *busy_seconds(tasks, link_of=link_of).values())

    def tasks(self, num_together: int) -> list[Task]:
        """Return the operations of a group as timed tasks."""
        step = self.step
        pricing = Pricing(step.rates, step.costs, step.blocks, self._shares, step.collectives)
        operations = self.program(num_together, is_short=True).operations
        return [task for operation in operations for task in operation.tasks(pricing)]

    def program(self, num_together: int, *, is_short: bool = False) -> Program:
        """List the operations of a group.

        Args:
            num_together: The number of micro-batches that pass together.
            is_short: Whether several pass in one visit.
        """
        spec = self.step.spec
        visits = min(num_together, _MOST_VISITS) if is_short else num_together
        each, more = divmod(num_together, visits)
        counts = [each + (number < more) for number in range(visits)]
        return visits_program(
            spec,
            [
                replace(visit, num_micro_batches=counts[visit.micro_batch])
                for visit in pass_visits(spec.layers, visits, outer=spec.outer, ends=spec.ends)
            ],
            [None] * spec.num_slots,
            fetches_outer=False,
            gathers=False,
        )

    @cached_property
    def _group_bytes(self) -> int:
        return self.program(1).moved()["fetch_bytes"]

    @cached_property
    def _shares(self) -> Shares:
        """Return what is left of the rates: nothing but copies to the device passes host memory."""
        rates = self.step.rates
        least_s = max(rates.fetch_s(self._group_bytes), self.step.costs.sums()[0] * self.together)
        demand = Demand(up_bytes=self._group_bytes, down_bytes=0.0, update_bytes=0.0, least_s=least_s)
        return Shares.of(rates, demand)
