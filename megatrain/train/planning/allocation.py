"""Where the memory of a run goes: planned before anything is allocated, and allocated as planned."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from megatrain.config import Config
from megatrain.config.choice import Choice, Plan
from megatrain.errors import ModelError
from megatrain.hardware import GIB
from megatrain.stream.engine import Engine
from megatrain.train.planning.plan_run import Planned, plan_training
from megatrain.train.planning.run_machine import Measure, machine_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_log = logging.getLogger(__name__)


def plan_memory(config: Config, model_config: PretrainedConfig, measure: Measure | None) -> Planned | None:
    """Plan a run; None, and a warning, if the model cannot be counted.

    Raises:
        CapacityError: It does not fit; nothing was allocated.
    """
    spec = machine_for(config, measure)
    try:
        planned = plan_training(config, model_config, spec)
    except ModelError as error:
        _log.warning("no plan, so rules of thumb decide where memory goes: %s", error)
        return None
    plan = planned.plan
    _log.info(
        "plan: %.3g s per step, bound by %s; %.2f GiB on the host, %.2f GiB on the device (%.2f s, %d timed)",
        plan.step_s,
        plan.bound,
        plan.tier_bytes("ram") / GIB,
        plan.tier_bytes("device") / GIB,
        planned.count_s + plan.plan_s,
        plan.num_evaluated,
    )
    return planned


def planned_updates(config: Config, choice: Choice | None) -> str:
    """Return when the optimizer updates."""
    if choice is not None:
        return choice.updates
    return "deferred" if config.optim.updates == "auto" else config.optim.updates


def check_allocated(engine: Engine, plan: Plan) -> None:
    """Assert that what a step has allocated is what the plan says, byte for byte.

    Args:
        engine: After its first step: gradients are allocated with it.
        plan: In force.
    """
    found, planned = engine.host.host_bytes, plan.host_plane_bytes
    assert found == planned, f"host planes take {found:,} bytes, and {planned:,} were planned: {plan.pools}"
    found, planned = engine.lanes.device_bytes, plan.device_pool_bytes
    assert found == planned, f"the device's pools hold {found:,} bytes, not {planned:,}: {plan.pools}"
