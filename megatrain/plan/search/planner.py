"""From a machine, a model and a batch to a plan: the fastest choice that fits, or why none does."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from megatrain.config.choice import Choice, Plan, Pool
from megatrain.hardware import GIB
from megatrain.plan.cost.step_time import Step
from megatrain.plan.program.operations import Kind
from megatrain.plan.search.choices import least
from megatrain.plan.search.remedies import Remedy
from megatrain.plan.search.request import Request, overflow, pools_of
from megatrain.plan.search.search import SEARCH_S, search

_PATIENCE_S = (1.5, 0.5)
"""Seconds of looking for a first way out, and for a second one."""

_MOST_WAYS = 2
_NAMES = {"device": "device memory", "ram": "host memory", "nvme": "drives"}


def make_plan(request: Request, *, remedies: Iterable[Remedy] = (), budget_s: float = SEARCH_S) -> Plan:
    """Return the plan of the fastest choice that fits; one that does not fit says what would.

    Args:
        request: What is asked for.
        remedies: What could be tried if nothing fits, in the order in which it should be proposed.
        budget_s: Seconds after which the best choice so far is taken.
    """
    began_s = time.perf_counter()
    found = search(request, budget_s=budget_s)
    if found is None:
        choice = least(request)
        problem = _problem(request, choice, remedies)
        return _describe(request, choice, problem, 0, time.perf_counter() - began_s)
    plan = _describe(request, found.choice, "", found.num_timed, 0.0)
    return replace(plan, plan_s=time.perf_counter() - began_s)


def plan_of(request: Request, choice: Choice) -> Plan:
    """Return the plan of a given choice, whether or not it is the best."""
    began_s = time.perf_counter()
    excess = overflow(request, choice)
    problem = _problem(request, choice, ()) if excess else ""
    plan = _describe(request, choice, problem, 1, 0.0)
    return replace(plan, plan_s=time.perf_counter() - began_s)


def _describe(request: Request, choice: Choice, problem: str, num_evaluated: int, plan_s: float) -> Plan:
    anatomy, batch = request.anatomy, request.batch
    step = Step(request.rates, anatomy, choice, batch, clips=request.clips)
    bounds = step.bounds_s
    step_s = step.step_s
    peak = request.spec.peak(anatomy.precision)
    flops = anatomy.model_flops_per_token * batch.tokens
    return Plan(
        choice=choice,
        batch=batch,
        fits=not problem,
        problem=problem,
        pools=tuple(pool for pool in pools_of(request, choice) if pool.nbytes),
        limits={tier: limit for tier, limit in request.limits.items() if limit is not None},
        step_s=step_s,
        bound=max(bounds, key=lambda name: bounds[name]),
        bounds_s=bounds,
        tokens_per_s=batch.tokens / step_s,
        mfu=flops / step_s / peak,
        hardware_mfu=_flops_done(step) / step_s / peak,
        bytes_per_step=_bytes(step),
        num_evaluated=num_evaluated,
        plan_s=plan_s,
    )


def _flops_done(step: Step) -> float:
    """Return the FLOPs of a step, recomputation included."""
    anatomy, count = step.anatomy, step.batch.num_micro_batches
    again = sum(
        layer.forward.matmul_flops + layer.forward.attention_flops
        for layer, policy in zip(anatomy.layers, step.choice.activations, strict=True)
        if policy in ("recompute", "drop_boundary")
    )
    return anatomy.model_flops_per_token * step.batch.tokens + again * count


def _bytes(step: Step) -> dict[str, int]:
    """Add up what the step's program moves."""

    def moved(*kinds: Kind) -> int:
        return sum(step.moved_bytes[kind] for kind in kinds)

    return {
        "fetched": moved(Kind.FETCH, Kind.LOAD),
        "offloaded": moved(Kind.OFFLOAD),
        "saved": moved(Kind.SAVE),
        "restored": moved(Kind.RESTORE),
        "updated": moved(Kind.UPDATE),
        "drive_read": moved(Kind.READ, Kind.PAGE, Kind.RECALL),
        "drive_written": moved(Kind.WRITE, Kind.STOW),
    }


def _problem(request: Request, choice: Choice, remedies: Iterable[Remedy]) -> str:
    """Say which pool is too large, by how much, and what would fit."""
    tier, limit = next((tier, request.limits[tier]) for tier in overflow(request, choice))
    assert limit is not None
    pools = [pool for pool in pools_of(request, choice) if pool.tier == tier and pool.nbytes]
    need = sum(pool.nbytes for pool in pools)
    found = _ways_out(remedies)
    way_out = f"use {', or '.join(found)}" if found else "use a machine with more of it and a smaller model"
    return (
        f"{_NAMES[tier]}: at least {_gib(need)} are needed ({_list(pools)}), but the limit is "
        f"{_gib(limit)}; {way_out}"
    )


def _ways_out(remedies: Iterable[Remedy]) -> list[str]:
    """Return the first way out, and a second one if it is found soon; none if that takes too long."""
    began_s = time.perf_counter()
    found: list[str] = []
    for remedy in remedies:
        text = remedy.way_out()
        found += [text] if text else []
        patience_s = _PATIENCE_S[bool(found)]
        if len(found) == _MOST_WAYS or time.perf_counter() - began_s > patience_s:
            break
    return found


def _list(pools: Iterable[Pool]) -> str:
    largest = sorted(pools, key=lambda pool: -pool.nbytes)
    shown = ", ".join(f"{pool.name} {_gib(pool.nbytes)}" for pool in largest[:4])
    return shown + (", ..." if len(largest) > 4 else "")


def _gib(nbytes: int) -> str:
    value = nbytes / GIB
    return f"{value:.1f} GiB" if value >= 10 else f"{value:.3g} GiB"
