"""The ways in which a run would spare its drives: each is planned, with the days that it gives.

For a run that uses up its drives' rated endurance, a way out is one with which it does not; for a shorter one
that would do so within a year, one with which they last that long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatrain.config.plan import Plan
from megatrain.plan.cost.economics import economics
from megatrain.plan.search.least_memory import enough_ram, fits
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.remedies import Remedy, list_states
from megatrain.plan.search.request import Request
from megatrain.plan.search.verdict import in_days, wear_of

LEAST_DAYS = 365.0
"""Drives that a plan uses up sooner deserve a word on how to avoid it."""

_MOST_DOUBLINGS = 6
"""The doublings of a step that are tried, at most: still larger steps train another model."""

_LEAST_SPEED = 0.9
"""Part of its speed that a run keeps with a larger step that is proposed."""

_SEARCH_OPERATIONS = 7_500


@dataclass(frozen=True, slots=True)
class _Run:
    """The rest of a run, with the bytes that it has written so far."""

    tokens: int
    written_bytes: int
    is_worn: bool
    """The run, as it is, outlives its drives."""

    def spares(self, request: Request, plan: Plan) -> bool:
        """Return whether drives last as long as they should."""
        if self.is_worn:
            return wear_of(request, plan, tokens=self.tokens, written_bytes=self.written_bytes) is None
        days = drive_days(request, plan)
        return days is None or days >= LEAST_DAYS

    def text(self, request: Request, plan: Plan) -> str:
        """Say how long the drives last."""
        money = economics(plan, request.spec, request.anatomy, tokens=self.tokens)
        if money.drive_days is None:
            return "nothing is written to drives"
        lasts = f"{in_days(money.drive_days)} days to rated endurance"
        return f"{lasts}, of which the run takes {in_days(money.days)}" if self.is_worn else lasts


def drive_days(request: Request, plan: Plan) -> float | None:
    """Return the days until a plan has used up its drives' rated endurance; None: not known, or no wear."""
    return economics(plan, request.spec, request.anatomy, tokens=1).drive_days


def spare_drives(
    request: Request, plan: Plan, *, tokens: int, written_bytes: int = 0, is_running: bool = False
) -> Iterator[str]:
    """Yield what makes the drives last, planned with the number that it names; nothing if they do.

    Args:
        request: The request for which the plan was made.
        plan: The plan, which writes to drives.
        tokens: The number of tokens that the run still trains on.
        written_bytes: The bytes that the run has written to its drives so far.
        is_running: Whether a run is about to begin: the machine is as it is then, and options of `plan` are
            none of it.
    """
    wear = wear_of(request, plan, tokens=tokens, written_bytes=written_bytes)
    run = _Run(tokens, written_bytes, wear is not None)
    days = drive_days(request, plan)
    if days is None or run.spares(request, plan):
        return
    for way in (*_commits(request, run), *_boundaries(request, plan)):
        found = make_plan(way.request, budget=_SEARCH_OPERATIONS)
        if found.fits and run.spares(way.request, found):
            yield f"{way.text}: {run.text(way.request, found)}, at {found.tokens_per_s:,.0f} tokens/s"
    if not request.commits:
        ram = enough_ram(replace(request, spec=request.spec.with_drive_bytes(0), host_limit=None))
        if ram is not None:
            option = f"{ram.text} of host memory" if is_running else f"--ram {ram.text}"
            yield f"{option}: nothing is written to drives"
    need = wear.num_days / max(wear.day, 1e-3 * wear.num_days) if wear is not None else LEAST_DAYS / days
    larger = _least_steps(request, plan, run, need)
    if larger is not None:
        yield (
            f"train.tokens_per_step={larger.batch.step_tokens} train.grad_accumulation=auto: "
            f"{run.text(request, larger)}, at {larger.tokens_per_s:,.0f} tokens/s"
        )
    for way in list_states(request) if run.is_worn else ():
        if not fits(way.request):
            continue
        found = make_plan(way.request, budget=_SEARCH_OPERATIONS)
        if run.spares(way.request, found):
            lasts = run.text(way.request, found)
            yield f"{way.text} (not exact): {lasts}, at {found.tokens_per_s:,.0f} tokens/s"
            return


def _commits(request: Request, run: _Run) -> Iterator[Remedy]:
    """Yield fewer commits: each writes the weights, and all that lives in RAM."""
    every = request.commit_every
    if every is None:
        return
    if run.is_worn:
        yield Remedy(f"memory.commit_every={10 * every}", replace(request, commit_every=10 * every))
    yield Remedy(
        "memory.commit_every=null (a crash goes back to the newest checkpoint)",
        replace(request, commit_every=None),
    )


def _boundaries(request: Request, plan: Plan) -> Iterator[Remedy]:
    """Yield activations that do not wait on drives, where a plan has put them there."""
    if plan.choice.boundaries == "nvme":
        kept = replace(request, choice=replace(request.choice, boundaries="host"))
        yield Remedy("memory.boundaries=host", kept)


def _least_steps(request: Request, plan: Plan, run: _Run, need: float) -> Plan | None:
    """Return the plan of the least doubling of a step with which the drives last; None: none is found.

    Each step writes the state once, so that twice as many tokens write half as often, and no less. A larger
    step that is much slower is none.

    Args:
        request: The request for which `plan` was made.
        plan: The plan of the step as it is.
        run: The rest of the run that is planned.
        need: The factor by which the drives should last longer.
    """
    for doublings in range(max(1, math.ceil(math.log2(need))), _MOST_DOUBLINGS + 1):
        count = request.batch.num_micro_batches << doublings
        larger = replace(request, batch=replace(request.batch, num_micro_batches=count))
        if not fits(larger):
            return None
        found = make_plan(larger, budget=_SEARCH_OPERATIONS)
        if found.tokens_per_s < _LEAST_SPEED * plan.tokens_per_s:
            return None
        if run.spares(larger, found):
            return found
    return None
