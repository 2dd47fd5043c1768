"""How far a step has come: the visits that compute has done, of those that were foreseen."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megatrain.plan.program.visits import Visit
from megatrain.stream.lanes import Lanes

_FORWARD, _BACKWARD = 1.0, 2.0
"""The work of a visit: a backward has two products for each of the forward's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """The part of a step's forward and backward that the device has done."""

    num_visits: int
    """The visits of layers that are done."""
    num_foreseen: int
    """All of them."""
    share: float
    """The share that is done, by work: from 0 to 1."""
    seconds: float
    """The time since the step's forward began."""


@dataclass(frozen=True, slots=True)
class StepVisits:
    """The visits of the step that is going on."""

    visits: Sequence[Visit]
    """All that were foreseen, in order."""
    began_s: float = field(default_factory=time.perf_counter)

    def passed(self, lanes: Lanes, outer: Collection[int], again: Mapping[int, float]) -> Passed:
        """Return how far the device has come; any thread may call it, and nobody waits.

        Args:
            lanes: The lanes, whose record since the step began is looked at.
            outer: The blocks whose work is no visit.
            again: How much of its forward a block's backward runs again, where that is more than nothing.
        """
        work = [
            _BACKWARD + again.get(visit.block, 0.0) if visit.is_backward else _FORWARD
            for visit in self.visits
            if visit.block >= 0 and visit.block not in outer
        ]
        done = min(lanes.num_visits(self.began_s), len(work))
        share = sum(work[:done]) / sum(work) if work else 0.0
        seconds = time.perf_counter() - self.began_s
        return Passed(num_visits=done, num_foreseen=len(work), share=share, seconds=seconds)
