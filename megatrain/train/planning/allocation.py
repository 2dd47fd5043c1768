"""Where the memory of a run goes: planned before anything is allocated, and allocated as planned."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatrain.config import Config
from megatrain.config.decided import smaller_step_settings
from megatrain.config.plan import Plan
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
from megatrain.stream.lanes.devices import compute_device
from megatrain.stream.machine import Measure
from megatrain.stream.ranks.shared_gradients import Ranks
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
    ranks: Ranks | None = None,
    *,
    lately: Lately | None = None,
    **of_run: Any,
) -> Planned | None:
    """Plan a run; None if the model cannot be counted: what `attach` then does is said there.

    Args:
        config: Of the run.
        model: That will be trained.
        measure: As in `machine_for`.
        ranks: That train together; the plan is of one rank's part.
        lately: As in `machine_for`.
        of_run: Further arguments of `plan_training`.

    Raises:
        ConfigError: Ranks cannot do what the settings ask for.
        CapacityError: It does not fit; nothing was allocated.
        WearError: It uses up its drives, and the settings do not accept that.
    """
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
    ranks: Ranks | None = None,
    *,
    num_steps: int = 0,
    earlier: Mapping[str, Any] | None = None,
    lately: Lately | None = None,
    given: Config | None = None,
) -> Planned:
    """Plan a run that is about to begin.

    Args:
        config: In which the step is decided; the size of micro-batches may be open, and is not in the plan's.
        model: That will be trained.
        spec: The machine.
        ranks: As in `plan_memory`.
        num_steps: Of the whole run.
        earlier: What a checkpoint or a commit says of the run, if it goes on.
        lately: As in `machine_for`.
        given: Settings as the user gave them; None: nothing is said of a small step.

    Raises:
        ConfigError, CapacityError, WearError: As `plan_memory`.
        ModelError: A model that cannot be counted.
    """
    began_s = time.perf_counter()
    is_compilable = can_compile(compute_device(config.train.device))

    def ask(config: Config, anatomy: Anatomy) -> Request:
        request = make_request(config, anatomy, spec, can_compile=is_compilable)
        if ranks is None:
            return request
        return of_ranks(request, ranks.size, ranks.num_nodes, gathers=ranks.gathers)

    config = with_fastest_size(config, model, device_type(spec), ask)
    recount = partial(model.count, config, device_type(spec))
    anatomy = recount()
    if spec.is_cpu:
        spec = with_layers_timed(spec, anatomy, model, config, lately or Lately(None))
    count_s = time.perf_counter() - began_s
    request = ask(config, anatomy)
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
    """Compare what a step has allocated with what the plan says, byte for byte.

    Args:
        engine: After its first step: gradients are allocated with it.
        plan: In force.
        on_mismatch: The setting `memory.on_mismatch`: `warn` or `stop`.

    Raises:
        CapacityError: They differ, and the setting says so.
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
