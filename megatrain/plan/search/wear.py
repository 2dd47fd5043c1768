"""How a run would spare the drives that it writes to: larger steps, or memory in which the state stays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatrain.config.choice import Plan
from megatrain.plan.cost.economics import economics
from megatrain.plan.search.enough import enough_ram
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request

LEAST_DAYS = 365.0
"""Drives that a plan uses up sooner deserve a word on how to avoid it."""

_MOST_TIMES = 64
"""Steps more than this many times larger train another model."""

_SEARCH_S = 0.3


def drive_days(request: Request, plan: Plan) -> float | None:
    """Return the days until a plan has used up its drives' rated endurance; None: not known, or no wear."""
    return economics(plan, request.spec, request.anatomy, tokens=1).drive_days


def spare_drives(request: Request, plan: Plan) -> Iterator[str]:
    """Yield what makes the drives last a year, planned with the number that it names; nothing if they do."""
    days = drive_days(request, plan)
    if days is None or days >= LEAST_DAYS:
        return
    larger = _larger_steps(request, days)
    if larger is not None:
        yield larger
    if not request.commits:
        ram = enough_ram(replace(request, spec=request.spec.with_drive_bytes(0)))
        if ram is not None:
            yield f"--ram {ram.text} (then nothing is written to drives)"


def _larger_steps(request: Request, days: float) -> str | None:
    """Return the least doubling of a step with which the drives last: each step writes the state once."""
    batch = request.batch
    times = 1 << math.ceil(math.log2(LEAST_DAYS / days))
    while times <= _MOST_TIMES:
        count = times * batch.num_micro_batches
        larger = replace(request, batch=replace(batch, num_micro_batches=count))
        plan = make_plan(larger, budget_s=_SEARCH_S)
        if not plan.fits:
            return None
        lasts = drive_days(larger, plan)
        if lasts is None or lasts >= LEAST_DAYS:
            until = "no wear" if lasts is None else f"{lasts:,.0f} days"
            return (
                f"train.grad_accumulation={count} ({until}; steps of {plan.batch.tokens:,} tokens, "
                f"{plan.tokens_per_s:,.0f} tokens/s)"
            )
        times *= 2
    return None
