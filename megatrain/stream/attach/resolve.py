"""Decides what a choice leaves open, for a model that is about to be attached: the planner does.

The model is counted as it is, with adapters and frozen parameters, from a copy of its modules without its
weights. A model that cannot be counted gets a conservative choice, and a warning says so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatrain.config.budgets import ALL
from megatrain.config.choice import AUTO, Choice
from megatrain.config.defaults import default_batch
from megatrain.config.plan import Plan
from megatrain.config.tiles import tile_of
from megatrain.distributed.alone import ALONE
from megatrain.errors import CapacityError, ModelError
from megatrain.hardware import GIB, HardwareSpec
from megatrain.model.blocks import find_blocks, group_layers
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_model
from megatrain.model.sequence.range import row_range
from megatrain.model.weights.kept import host_bytes_of
from megatrain.plan.search.conservative import conservative
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.remedies import advise, with_ways_out
from megatrain.plan.search.request import Request
from megatrain.plan.search.small_step import larger_step
from megatrain.store.state import HostState
from megatrain.stream.attach.bind import plan_layouts
from megatrain.stream.choice_checks import as_placed
from megatrain.stream.forward.arrangement import residents_of
from megatrain.stream.job.job import Job
from megatrain.stream.lanes import Lanes
from megatrain.stream.machine import machine_of
from megatrain.stream.memory import require_device_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a plan depends on beside the model: none of it is a choice."""

    lanes: Lanes
    job: Job
    """The job; without a batch `default_batch` is planned, for the model's context."""
    compiles: bool = False
    budget: float = ALL
    """The budget within which layers are compiled, if they are."""
    deterministic: bool = False

    @property
    def num_drives(self) -> int:
        """The number of drives on which state is; 0: all of it is in RAM."""
        return 0 if self.job.tiers is None else len(self.job.tiers.nvme)


def resolve(model: PreTrainedModel, choice: Choice, given: Conditions) -> tuple[Choice, int]:
    """Return a choice in which nothing is open, and how many tokens may pass together without gradients.

    The latter is 0 where nothing is planned: those of a round of training may.

    Args:
        model: The model, as `attach` is given it. It is not changed, and what it has allocated stays.
        choice: The choice as far as it is decided; what is decided is kept.
        given: The conditions of the run.

    Raises:
        ConfigError: What is decided does not fit the model, or excludes every choice.
        CapacityError: Nothing that is open makes it fit.
    """
    num_layers = len(group_layers(find_blocks(model)))
    choice = choice.for_layers(num_layers)
    if choice.is_resolved:
        return choice, 0
    choice = _as_held(model, choice, given)
    spec = machine_of(given.lanes, given.job.precision.value, num_drives=given.num_drives)
    usual = default_batch(row_range(model.config).longest, on_cpu=spec.is_cpu)
    is_given, job = given.job.batch is not None, replace(given.job, batch=given.job.batch or usual)
    given = replace(given, job=job)
    count = partial(_count, model, choice, given, "accelerator" if spec.has_accelerator else "cpu")
    try:
        anatomy = count()
    except ModelError as error:
        _log.warning(
            "%s; so nothing is planned, and memory is used cautiously: every layer recomputed, none "
            "resident, one micro-batch at a time; give attach a choice to do better",
            error,
        )
        return _conservative(model, choice, given), 0
    own = sum(map(host_bytes_of, model.parameters()))  # becomes part of the state, or is freed
    host: HostState | None = model.__dict__.get("_megatrain_host")
    if host is not None and host.has_drives:
        # the limit is `tiers.ram`, which the state has filled
        given = replace(given, job=replace(job, host_limit=None))
    request = _request(choice, given, anatomy, spec.with_ram(spec.host_bytes + own))
    plan = make_plan(request)
    if not plan.fits:
        raise CapacityError(with_ways_out(plan.problem, advise(request, count, is_running=True)))
    _report(plan)
    larger = larger_step(request, plan) if is_given else None
    if larger is not None:
        setting = f"{larger.factor} times as many micro-batches (gradient_accumulation_steps of a trainer)"
        _log.warning("%s", larger.text(plan, f"a step of {setting}"))
    return plan.choice, plan.tokens_together


def _count(
    model: PreTrainedModel, choice: Choice, given: Conditions, device_type: str, **changes: Any
) -> Anatomy:
    """Count the model for a run, or with another `precision`, `micro_batch_size` or `seq_len`."""
    assert given.job.batch is not None
    shape = {
        "micro_batch_size": given.job.batch.micro_batch_size,
        "seq_len": given.job.batch.seq_len,
        "precision": given.job.precision.value,
        "sequence": given.job.batch.sequence,
        "compiles": given.compiles,
    } | changes
    shape.setdefault("tile", tile_of(shape["seq_len"], given.job.batch.tile_tokens))
    chunk = choice.given.get("head_chunk_tokens")
    return count_model(model, **shape, head_chunk_tokens=chunk, device_type=device_type)


def _request(choice: Choice, given: Conditions, anatomy: Anatomy, spec: HardwareSpec) -> Request:
    assert given.job.batch is not None
    return Request(
        spec=spec,
        anatomy=anatomy,
        batch=given.job.batch,
        optimizer_name=given.job.optimizer.name,
        state=given.job.optimizer.state,
        compiles=given.compiles,
        budget=given.budget,
        deterministic=given.deterministic,
        commit_every=1 if given.num_drives else None,
        names_drives=given.num_drives > 0,
        device_limit=given.lanes.device_limit,
        host_limit=given.job.host_limit,
        choice=choice,
    )


def _as_held(model: PreTrainedModel, choice: Choice, given: Conditions) -> Choice:
    """Return a choice that leaves the state of a loaded model where and as it is."""
    host: HostState | None = model.__dict__.get("_megatrain_host")
    if host is None:
        return choice
    choice = as_placed(choice, host)
    if choice.mirror_resident == AUTO and not host.on_device.blocks:  # all of it has its place in RAM
        choice = replace(choice, mirror_resident=True)
    if choice.fragments == AUTO:
        for fragments in (False, True):
            blocks = find_blocks(model, **{**choice.split, "fragments": fragments})
            if list(host.layouts) == plan_layouts(model, blocks, given.job.precision):
                return replace(choice, fragments=fragments)
    return choice


def _conservative(model: PreTrainedModel, choice: Choice, given: Conditions) -> Choice:
    layers = {parts: group_layers(find_blocks(model, fragments=parts)) for parts in (False, True)}

    one = replace(given.job, batch=None, ranks=ALONE)  # one micro-batch at a time

    def fits(found: Choice) -> bool:
        blocks = find_blocks(model, **found.split)
        layouts = plan_layouts(model, blocks, given.job.precision)
        residents = residents_of(found, blocks)
        try:
            require_device_memory(blocks, layouts, given.lanes, found, residents, one)
        except CapacityError:
            return False
        return True

    return conservative(choice, len(layers[False]), max(map(len, layers[True])), fits)


def _report(plan: Plan) -> None:
    batch = plan.batch
    _log.info(
        "plan for steps of %d x %d x %d tokens: %.3g s, bound by %s; %s tokens of an evaluation or a "
        "reference together: %.3g s; %.2f GiB on the host, %.2f GiB on the device; %s",
        batch.num_micro_batches,
        batch.micro_batch_size,
        batch.seq_len,
        plan.step_s,
        plan.bound,
        f"{plan.tokens_together:,}",
        plan.pass_s,
        plan.tier_bytes("ram") / GIB,
        plan.tier_bytes("device") / GIB,
        plan.choice.describe(),
    )
