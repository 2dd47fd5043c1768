"""A plan as plain values, as `megatrain plan --json` prints it and a run keeps it."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from megatrain.config import config_keys
from megatrain.config.choice import KEYS
from megatrain.config.plan import Plan
from megatrain.plan.cost.economics import Economics
from megatrain.train.planning.plan_run import Planned


def plan_json(planned: Planned, money: Economics, lines: list[str]) -> dict[str, Any]:
    """Return a plan as plain values: bytes, seconds, US dollars.

    Args:
        planned: The plan.
        money: The cost of its token budget.
        lines: The lines of `explain`; there may be none.
    """
    plan, request = planned.plan, planned.request
    spec, anatomy = request.spec, request.anatomy
    return {
        "fits": plan.fits,
        "verdict": planned.verdict.json(),
        "problem": plan.problem or None,
        "remedies": [remedy.text for remedy in planned.remedies],
        "machine": spec.name,
        "gpus": spec.num_gpus,
        "nodes": spec.num_nodes,
        "device": spec.device,
        "model": {
            "path": planned.model,
            "type": anatomy.model_type,
            "num_params": anatomy.num_params,
            "num_active_params": anatomy.num_active_params,
            "num_layers": len(anatomy.layers),
        },
        "precision": anatomy.precision,
        "clips": request.clips,
        "batch": {**asdict(plan.batch), "tokens": plan.batch.step_tokens},
        "pools": [asdict(pool) for pool in plan.pools],
        "limits": dict(plan.limits),
        "step_s": plan.step_s,
        "bound": plan.bound,
        "bounds_s": dict(plan.bounds_s),
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "hardware_mfu": plan.hardware_mfu,
        "policy": policy(plan),
        "layers": [[name, len(list(same))] for name, same in groupby(plan.choice.activations)],
        "bytes_per_step": dict(plan.bytes_per_step),
        "evaluation": {
            "micro_batches_together": plan.together,
            "tokens_together": plan.tokens_together,
            "pass_s": plan.pass_s,
            "pass_bytes": plan.pass_bytes,
        },
        **asdict(money),
        "watching": {**asdict(planned.watching), "share": planned.watching.share} if plan.fits else None,
        "spares": list(planned.spares),
        "stop": planned.stop.json() if plan.fits else None,
        "space": None if planned.space is None else planned.space.json(),
        "num_evaluated": plan.num_evaluated,
        "plan_s": plan.plan_s,
        "count_s": planned.count_s,
        "hint": planned.hint or None,
        "notes": list(planned.notes),
        **({"explain": lines} if lines else {}),
    }


def policy(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the choice as settings that a CONFIG takes.

    A choice that differs between layers is `auto` there, which makes the same choice again.
    """
    choice = plan.choice
    values: dict[str, dict[str, Any]] = {}
    for field, key in KEYS.items():
        if key not in config_keys():
            continue
        value = getattr(choice, field)
        if isinstance(value, tuple):  # a tuple names drives only where the settings do
            value = value[0] if len(set(value)) == 1 and "nvme" not in value else "auto"
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return values
