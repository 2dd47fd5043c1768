"""The memory of a run is planned before anything is allocated, and allocated as planned."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatrain.config import Config
from megatrain.config.decided import smaller_step_settings
from megatrain.config.plan import Plan
from megatrain.distributed.alone import ALONE
from megatrain.errors import CapacityError, ModelError, WearError
from megatrain.hardware import GIB, HardwareSpec
from megatrain.hardware.accelerators import can_compile
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.remedies import advise, with_ways_out
from megatrain.plan.search.request import Request
from megatrain.plan.search.verdict import judge
from megatrain.plan.search.wear import spare_drives
from megatrain.stream.engine import Engine
from megatrain.stream.job.ranks import Ranks
from megatrain.stream.lanes.devices import compute_device
from megatrain.stream.machine import Measure
from megatrain.train.planning.asking import make_request
from megatrain.train.planning.counting import PlannedModel, device_type
from megatrain.train.planning.gpus import of_ranks
from megatrain.train.planning.lately import Lately
from megatrain.train.planning.micro_batches import with_fastest_size
from megatrain.train.planning.plan_run import Planned, done_before, open_sizes, step_hint
from megatrain.train.planning.run_machine import machine_for, with_layers_timed

_log = logging.getLogger(__name__)


def plan_memory(
    config: Config,
    model: PlannedModel,
    measure: Measure | None,
    ranks: Ranks = ALONE,
    *,
    lately: Lately | None = None,
    **of_run: Any,
) -> Planned | None:
    """Plan a run; return None if the model cannot be counted, in which case `attach` decides.

    Args:
        config: The settings of the run.
        model: The model that will be trained.
        measure: The measurement of the machine, as in `machine_for`.
        ranks: The ranks that train together; the plan is of one rank's part.
        lately: The recent measurements, as in `machine_for`.
        of_run: The further arguments of `plan_training`.

    Raises:
        ConfigError: The ranks cannot do what the settings ask for.
        CapacityError: The run does not fit; nothing was allocated.
        WearError: The run uses up its drives, and the settings do not accept that.
    """
    gc.collect()  # a run or an attempt before has left its state in cycles, which counts as taken
    spec = machine_for(config, measure, lately)
    try:
        planned = plan_training(config, model, spec, ranks, lately=lately, **of_run)
    except ModelError:
        return None
    plan = planned.plan
    _log.debug(
        "plan: %.3g s per step, bound by %s; %.2f GiB on the host, %.2f GiB on the device (%.2f s, %d timed)",
        plan.step_s,
        plan.bound,
        plan.tier_bytes("ram") / GIB,
        plan.tier_bytes("device") / GIB,
        planned.count_s + plan.plan_s,
        plan.num_evaluated,
    )
    return planned


def plan_training(
    config: Config,
    model: PlannedModel,
    spec: HardwareSpec,
    ranks: Ranks = ALONE,
    *,
    num_steps: int = 0,
    earlier: Mapping[str, Any] | None = None,
    lately: Lately | None = None,
    given: Config | None = None,
) -> Planned:
    """Plan a run that is about to begin.

    Args:
        config: The settings, in which the step is decided; the plan's decide micro-batches too.
        model: The model that will be trained.
        spec: The machine.
        ranks: The ranks, as in `plan_memory`.
        num_steps: The number of steps of the whole run.
        earlier: The record of the run in its checkpoint or commit, if it resumes.
        lately: The recent measurements, as in `machine_for`.
        given: The settings as the user gave them; None gives no hint about a small step.

    Raises:
        ConfigError, CapacityError, WearError: `plan_memory` raises it.
        ModelError: The model cannot be counted.
    """
    began_s = time.perf_counter()
    is_compilable = can_compile(compute_device(config.train.device))

    def ask(config: Config, anatomy: Anatomy) -> Request:
        request = make_request(config, anatomy, spec, can_compile=is_compilable)
        return of_ranks(request, ranks.size, ranks.num_nodes, gathers=ranks.gathers)

    config, start = with_fastest_size(config, model, device_type(spec), ask)
    recount = partial(model.count, config, device_type(spec))
    anatomy = recount()
    if spec.is_cpu:
        spec = with_layers_timed(spec, anatomy, model, config, lately or Lately(None))
    count_s = time.perf_counter() - began_s
    request = replace(ask(config, anatomy), start=start)
    plan = make_plan(request)
    if not plan.fits:
        smaller = None if given is None or earlier is not None else partial(smaller_step_settings, given)
        remedies = advise(request, recount, is_running=True, smaller=smaller)
        raise CapacityError(with_ways_out(plan.problem, remedies))
    done, written_bytes = done_before(earlier)
    tokens = max(0, num_steps - done) * plan.batch.step_tokens
    others = partial(open_sizes, request, recount, given if earlier is None else None)
    verdict = judge(request, plan, tokens=tokens, written_bytes=written_bytes, others=others)
    if verdict.wear is not None and not config.memory.accept_wear:
        ways = spare_drives(request, plan, tokens=tokens, written_bytes=written_bytes, is_running=True)
        raise WearError(f"{verdict.text}; use {', or '.join([*ways, _ALL_THE_SAME])}")
    return Planned(
        plan=plan,
        request=request,
        config=config,
        model=config.model.path,
        count_s=count_s,
        tokens=tokens,
        verdict=verdict,
        hint="" if given is None else step_hint(request, plan, given),
    )


_ALL_THE_SAME = "memory.accept_wear=true to train all the same"


def check_allocated(engine: Engine, plan: Plan, on_mismatch: str) -> None:
    """Compare the allocations of a step with the plan, byte for byte.

    Args:
        engine: The engine after its first step, which allocates gradients.
        plan: The plan in force.
        on_mismatch: The setting `memory.on_mismatch`: `warn` or `stop`.

    Raises:
        CapacityError: The bytes differ, and the setting is `stop`.
    """
    found = {**engine.host.plane_bytes, _ON_DEVICE: engine.lanes.device_bytes}
    planned = {**plan.host_planes, _ON_DEVICE: plan.device_pool_bytes}
    differences = [
        f"{name} {found.get(name, 0):,} in place of {planned.get(name, 0):,}"
        for name in planned | found
        if found.get(name, 0) != planned.get(name, 0)
    ]
    if not differences:
        return
    text = f"memory is not as planned: the first step has taken, in bytes, {', '.join(differences)}"
    if on_mismatch == "stop":
        raise CapacityError(f"{text}; use memory.on_mismatch=warn to go on all the same")
    _log.warning("%s; the run goes on, which memory.on_mismatch=stop would not let it", text)


_ON_DEVICE = "pools on the device"
