"""Elasticity: a run that finds its machine faster or slower than planned arranges itself anew between steps.

After a few steps the measured rates of links, updates and compute take the place of predicted ones. When they
have changed, the plan is made again, and obeyed if it is enough faster. What may change are choices of the
plan, none of which changes a bit of the result.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from megatrain.config.choice import Choice
from megatrain.config.plan import Plan
from megatrain.plan.cost.measured import Measured
from megatrain.plan.search.planner import make_plan, plan_of
from megatrain.plan.search.request import Request
from megatrain.plan.search.search import SEARCH_OPERATIONS
from megatrain.stream.engine import Engine
from megatrain.stream.report import StepReport

_log = logging.getLogger(__name__)

GAIN = 0.05
"""Share of a step's time that a new plan must save."""

CHANGE = 0.1
"""Share by which a rate must differ from the one that was planned with before planning is worth its time."""

WARM_UP_STEPS = 2
"""Steps that allocate, compile and touch memory for the first time: their times say little."""

MOST_BUDGET = 8 * SEARCH_OPERATIONS
"""Of a search between two steps: one that its budget ends has twice as much after the next."""


class Elastic:
    """Watches the steps of an engine, and reconfigures it."""

    def __init__(self, engine: Engine, request: Request, plan: Plan) -> None:
        """Watch an engine that runs as `plan` says, which was made for `request`."""
        self._engine = engine
        self._request = replace(request, choice=replace(request.choice, **_lasting(plan.choice)))
        if not (request.commits or plan.choice.uses_drives):  # none is open
            self._request = replace(self._request, spec=request.spec.with_drive_bytes(0))
        self._choice = plan.choice
        self._known = Measured()
        """What the present plan was made with."""
        self._steps_to_wait = WARM_UP_STEPS
        self._budget = SEARCH_OPERATIONS
        self._is_done = True
        """The last search ended before its budget did."""
        self._reason = ""
        self.num_changes = 0

    def after_step(self, report: StepReport) -> str:
        """Take a step's report in; return why the plan was changed, empty if it was not."""
        if self._steps_to_wait > 0:
            self._steps_to_wait -= 1
            return ""
        measured = self._measure(report)
        reason = measured.differs(self._known, CHANGE) or self._is_first()
        if reason:
            self._budget, self._reason = SEARCH_OPERATIONS, reason
        elif self._is_done:
            return ""
        self._known = measured
        request = replace(self._request, spec=measured.applied(self._request.spec))
        now = plan_of(request, self._choice)
        best = make_plan(request, budget=self._budget)
        self._is_done = not best.is_cut_short or self._budget >= MOST_BUDGET
        self._budget *= 2
        gain = 1 - best.step_s / now.step_s
        if not best.fits or best.choice == self._choice or gain < GAIN:
            return ""
        self._engine.reconfigure(best.choice)
        self._engine.together.planned_tokens = best.tokens_together
        message = (
            f"new plan ({self._reason}): {describe_change(self._choice, best.choice)}; a step should take "
            f"{best.step_s:.4g} s in place of {now.step_s:.4g} s"
        )
        _log.info("%s", message)
        self._choice = best.choice
        self._steps_to_wait = 1
        self.num_changes += 1
        return message

    def _is_first(self) -> str:
        return "" if self._known != Measured() else "first measurement"

    def _measure(self, report: StepReport) -> Measured:
        """Compare a step with what its plan says of it at the rates of the machine as it was described."""
        request = self._request
        step = request.step(self._choice)
        return Measured.of(
            report.lane_seconds,
            {
                "fetch": report.fetch_bytes + report.restored_bytes,
                "offload": report.offload_bytes + report.saved_bytes,
                "host": report.update_bytes,
            },
            step.compute_s,
        )


def _lasting(choice: Choice) -> dict[str, Any]:
    """Return what cannot change while an engine lives."""
    placed: dict[str, Any] = {}
    if choice.tiers:  # what is on drives depends on it
        placed["updates"] = choice.updates
    if choice.uses_drives:  # from there no block goes to the device for good
        placed |= {"resident_layers": 0, "outer_resident": False}
    if choice.boundaries == "nvme":  # the last resort, and the buffers before drives are counted for it
        placed["boundaries"] = choice.boundaries
    return {
        **placed,
        "fragments": choice.fragments,
        "tiers": choice.tiers,
        "blocks_in_ram": choice.blocks_in_ram,
        "weights_in_ram": choice.weights_in_ram,
        "head_chunk_tokens": choice.head_chunk_tokens,
    }


def describe_change(old: Choice, new: Choice) -> str:
    """Name what differs between two choices."""
    changes = []
    for name in Choice.__dataclass_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if name == "activations":
            before, after = _counts(before), _counts(after)
        changes.append(f"{name} {before} -> {after}")
    return ", ".join(changes)


def _counts(activations: tuple[str, ...]) -> str:
    kinds = dict.fromkeys(activations)
    return " + ".join(f"{activations.count(kind)} {kind}" for kind in kinds)
