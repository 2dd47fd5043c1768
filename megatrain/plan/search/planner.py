"""The plan for a machine, a model and a batch: the fastest choice that fits, or why none does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from megatrain.config.choice import Choice
from megatrain.config.plan import Plan, Pool
from megatrain.config.sizes import binary
from megatrain.plan.cost.passes import Passes
from megatrain.plan.cost.step_time import Step
from megatrain.plan.program.operations import KINDS
from megatrain.plan.search.choices import least
from megatrain.plan.search.request import Request, most_together, overflow, pools_of
from megatrain.plan.search.search import SEARCH_OPERATIONS, search

_MOVED = {
    **{"fetched": "fetch_bytes", "offloaded": "offload_bytes", "saved": "saved_bytes"},
    **{"restored": "restored_bytes", "updated": "update_bytes"},
    **{"drive_read": "drive_read_bytes", "drive_written": "drive_write_bytes"},
    **{"gathered": "gathered_bytes", "exchanged": "exchanged_bytes", "spread": "spread_bytes"},
}
"""The names under which a plan shows bytes of a step, with the counters of `Operation.moves`."""

_NAMES = {"device": "device memory", "ram": "host memory", "nvme": "drives"}


def make_plan(request: Request, *, budget: int = SEARCH_OPERATIONS, enough_s: float = 0.0) -> Plan:
    """Return the plan of the fastest choice that fits; one that does not fit says what is too small.

    Args:
        request: The request to plan.
        budget: The number of operations that are placed before the best choice so far is taken; see `search`.
        enough_s: The seconds of a step that are few enough to look no further.
    """
    began_s = time.perf_counter()
    found = search(request, budget=budget, enough_s=enough_s)
    if found is None:
        choice = least(request)
        problem = _problem(request, choice)
        return _describe(request, request.step(choice), problem, 0, time.perf_counter() - began_s)
    plan = _describe(request, found.step, "", found.num_timed, 0.0)
    return replace(plan, plan_s=time.perf_counter() - began_s, is_cut_short=found.is_cut_short)


def plan_with_open_runs(request: Request) -> Plan:
    """Return the faster of two plans: with the runs of the request, and with one of each round.

    Of several ranks, one run each leaves a rank whole sums between rounds, where runs that end with their
    rounds are exchanged each time, and shares are left.
    """
    plans = [make_plan(request)]
    if request.batch.num_ranks > request.batch.sequence and request.batch.num_micro_batches > 1:
        plans.append(make_plan(replace(request, batch=replace(request.batch, runs_are_rounds=True))))
    return max(plans, key=lambda plan: (plan.fits, plan.tokens_per_s))


def plan_of(request: Request, choice: Choice) -> Plan:
    """Return the plan of a given choice, whether or not it is the best."""
    began_s = time.perf_counter()
    excess = overflow(request, choice)
    problem = _problem(request, choice) if excess else ""
    plan = _describe(request, request.step(choice), problem, 1, 0.0)
    return replace(plan, plan_s=time.perf_counter() - began_s)


def _describe(request: Request, step: Step, problem: str, num_evaluated: int, plan_s: float) -> Plan:
    anatomy, batch, choice = request.anatomy, request.batch, step.choice
    bounds = step.bounds_s
    step_s = step.step_s
    passes = Passes.of(step, most_together(request, choice))
    peak = request.spec.peak(anatomy.precision)
    flops = anatomy.model_flops_per_token * batch.tokens
    return Plan(
        choice=choice,
        batch=replace(batch, num_runs=step.partial_sums.runs.number, runs_are_rounds=False),
        fits=not problem,
        problem=problem,
        pools=tuple(pool for pool in pools_of(request, choice) if pool.nbytes),
        limits={tier: limit for tier, limit in request.limits.items() if limit is not None},
        step_s=step_s,
        bound=max(bounds, key=lambda name: bounds[name]),
        bounds_s=bounds,
        tokens_per_s=batch.step_tokens / step_s,
        mfu=flops / step_s / peak,
        hardware_mfu=_flops_done(step) / step_s / peak,
        bytes_per_step=_bytes(step),
        num_evaluated=num_evaluated,
        together=passes.together,
        pass_s=passes.seconds(passes.together),
        pass_bytes=passes.fetched_bytes(passes.together),
        plan_s=plan_s,
    )


def _flops_done(step: Step) -> float:
    """Return the FLOPs of a step, recomputation included."""
    anatomy, count = step.anatomy, step.batch.num_micro_batches
    pairs = zip(anatomy.layers, step.choice.policies, strict=True)
    costs = [layer.rerun(policy) for layer, policy in pairs]
    costs += [anatomy.again_of(number) for number in range(len(anatomy.layers))]
    again = sum(cost.matmul_flops + cost.attention_flops for cost in costs)
    return anatomy.model_flops_per_token * step.batch.tokens + again * count


def _bytes(step: Step) -> dict[str, int]:
    """Add up what the step's program moves."""
    moved: Counter[str] = Counter()
    for label, nbytes in step.moved_bytes.items():
        moved[KINDS[label].moves] += nbytes
    return {
        **{name: moved[counted] for name, counted in _MOVED.items()},
        "swapped": round(_swapped(step)),
    }


def _swapped(step: Step) -> float:
    """Return the bytes that ranks that share out rows give each other in a step."""
    policies = step.choice.policies
    made_again = [policy.drops(number) for number, policy in enumerate(policies)][1:]
    return step.batch.num_micro_batches * sum(
        layer.forward.swapped_bytes * (1 + policy.reruns + is_for_next) + layer.backward.swapped_bytes
        for layer, policy, is_for_next in zip(
            step.anatomy.layers, policies, [*made_again, False], strict=True
        )
    )


def _problem(request: Request, choice: Choice) -> str:
    """Say of each tier that is too small by how much, and what wants it."""
    return "; ".join(_shortage(request, choice, tier) for tier in overflow(request, choice))


def _shortage(request: Request, choice: Choice, tier: str) -> str:
    pools = [pool for pool in pools_of(request, choice) if pool.tier == tier and pool.nbytes]
    need = sum(pool.nbytes for pool in pools)
    return f"{_NAMES[tier]}: at least {binary(need)} are needed ({_list(pools)}), but {_limit(request, tier)}"


def _limit(request: Request, tier: str) -> str:
    """Say what a tier may take, and why it is no more."""
    limit, spec = request.limits[tier], request.spec
    assert limit is not None
    if limit == {"ram": request.host_limit, "device": request.device_limit}.get(tier):
        return f"the limit is {binary(limit)}"
    if tier == "nvme":
        return f"{binary(limit)} are free" if limit else "there are none"
    has = spec.host_bytes if tier == "ram" else spec.device_bytes
    return f"the limit is {binary(limit)}" + ("" if has in (None, limit) else f" of {binary(has or 0)}")


def _list(pools: Iterable[Pool]) -> str:
    largest = sorted(pools, key=lambda pool: -pool.nbytes)
    shown = ", ".join(f"{pool.name} {binary(pool.nbytes)}" for pool in largest[:4])
    return shown + (", ..." if len(largest) > 4 else "")
