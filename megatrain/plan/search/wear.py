"""How a run would spare the drives that it writes to: larger steps, or memory in which the state stays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatrain.config.plan import Plan
from megatrain.plan.cost.economics import economics
from megatrain.plan.search.enough import enough_ram, fits
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request

LEAST_DAYS = 365.0
"""Drives that a plan uses up sooner deserve a word on how to avoid it."""

_MOST_DOUBLINGS = 6
"""Of a step: larger ones train another model."""

_SEARCH_OPERATIONS = 7_500


def drive_days(request: Request, plan: Plan) -> float | None:
    """Return the days until a plan has used up its drives' rated endurance; None: not known, or no wear."""
    return economics(plan, request.spec, request.anatomy, tokens=1).drive_days


def spare_drives(request: Request, plan: Plan) -> Iterator[str]:
    """Yield what makes the drives last a year, planned with the number that it names; nothing if they do."""
    days = drive_days(request, plan)
    if days is None or days >= LEAST_DAYS:
        return
    if request.commits:
        free = make_plan(replace(request, commit_every=None), budget=_SEARCH_OPERATIONS)
        if free.fits and not free.choice.tiers and _endures(request, free):
            yield (
                "memory.commit_every=null: RAM holds the state, and none of it is written to drives; a crash "
                "goes back to the newest checkpoint"
            )
    else:
        ram = enough_ram(replace(request, spec=request.spec.with_drive_bytes(0), host_limit=None))
        if ram is not None:
            yield f"--ram {ram.text}: nothing is written to drives"
    larger = _least_steps(request, days)
    if larger is not None:
        lasts = drive_days(request, larger)
        until = "no wear" if lasts is None else f"{lasts:,.0f} days to rated endurance"
        yield (
            f"train.grad_accumulation={larger.batch.num_micro_batches}: {until}, by steps of "
            f"{larger.batch.step_tokens:,} tokens at {larger.tokens_per_s:,.0f} tokens/s"
        )


def _least_steps(request: Request, days: float) -> Plan | None:
    """Return the plan of the least doubling of a step with which the drives last; None: none is found.

    Each step writes the state once, so larger ones write less often.
    """
    known: dict[int, Plan | None] = {}

    def lasting(doublings: int) -> Plan | None:
        if doublings not in known:
            known[doublings] = _lasting(request, request.batch.num_micro_batches << doublings)
        return known[doublings]

    doublings = min(math.ceil(math.log2(LEAST_DAYS / days)), _MOST_DOUBLINGS)
    while lasting(doublings) is None:
        if doublings == _MOST_DOUBLINGS:
            return None
        doublings += 1
    while doublings > 1 and lasting(doublings - 1) is not None:
        doublings -= 1
    return lasting(doublings)


def _lasting(request: Request, num_micro_batches: int) -> Plan | None:
    """Return the plan of a step of so many micro-batches; None: it does not fit, or drives do not last."""
    larger = replace(request, batch=replace(request.batch, num_micro_batches=num_micro_batches))
    if not fits(larger):
        return None
    plan = make_plan(larger, budget=_SEARCH_OPERATIONS)
    return plan if _endures(larger, plan) else None


def _endures(request: Request, plan: Plan) -> bool:
    """Whether the drives last, or are not worn."""
    days = drive_days(request, plan)
    return days is None or days >= LEAST_DAYS
