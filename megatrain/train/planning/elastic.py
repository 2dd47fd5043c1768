"""Elasticity: a run whose machine is faster or slower than planned rearranges itself between steps.

After a few steps the measured rates of links, updates and compute replace the predicted ones. When they have
changed, the plan is made again, and obeyed if it is enough faster. Only choices that change no bit of the
result may change.
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
"""The share of a step's time that a new plan must save."""

CHANGE = 0.1
"""The share by which a rate must differ from the planned one to make planning again worth its time."""

WARM_UP_STEPS = 2
"""The number of steps that allocate, compile and touch new memory, so that their times say little."""

MOST_BUDGET = 8 * SEARCH_OPERATIONS
"""The largest budget of a search between two steps; a search that uses it up gets twice as much next."""


class Elastic:
    """Watches the steps of an engine, and reconfigures it."""

    def __init__(self, engine: Engine, request: Request, plan: Plan) -> None:
        """Watch an engine that runs by `plan`, which was made for `request`."""
        self._engine = engine
        self._request = replace(request, choice=replace(request.choice, **_lasting(plan.choice)))
        if not (request.commits or plan.choice.uses_drives):  # otherwise nothing is open
            self._request = replace(self._request, spec=request.spec.with_drive_bytes(0))
        self._choice = plan.choice
        self._known = Measured()
        """The rates with which the present plan was made."""
        self._steps_to_wait = WARM_UP_STEPS
        self._budget = SEARCH_OPERATIONS
        self._is_done = True
        """Whether the last search ended within its budget."""
        self._reason = ""
        self.num_changes = 0

    def after_step(self, report: StepReport) -> str:
        """Take a step's report; return why the plan was changed, or an empty text if it was not."""
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
        """Compare a step with the plan's prediction at the rates of the described machine."""
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
    """Return the choices that cannot change while an engine lives."""
    placed: dict[str, Any] = {}
    if choice.tiers:  # the state on drives depends on it
        placed["updates"] = choice.updates
    if choice.uses_drives:  # no block moves from drives to the device for good
        placed |= {"resident_layers": 0, "outer_resident": False}
    if choice.has_state_on_device:  # the places of these blocks in RAM have no memory
        placed |= {"resident_layers": choice.resident_layers, "outer_resident": choice.outer_resident}
    if choice.boundaries == "nvme":  # this is a last resort, and its buffers are counted
        placed["boundaries"] = choice.boundaries
    return {
        **placed,
        "fragments": choice.fragments,
        "expert_chunks": choice.expert_chunks,
        "mirror_resident": choice.mirror_resident,
        "tiers": choice.tiers,
        "blocks_in_ram": choice.blocks_in_ram,
        "weights_in_ram": choice.weights_in_ram,
        "head_chunk_tokens": choice.head_chunk_tokens,
    }


def describe_change(old: Choice, new: Choice) -> str:
    """Return the names of the differences between two choices."""
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
