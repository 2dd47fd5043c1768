"""Which choices an engine can run, and can go on with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatrain.config.choice import WITHOUT_DRIVES, Choice, Updates, read_member
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import OPTIMIZERS, find
from megatrain.config.read_choice import checked
from megatrain.errors import ConfigError, warn_once
from megatrain.model.attention_results import runs_twice, why_none
from megatrain.model.blocks import Block, ends_of, group_layers, num_chunks, num_together
from megatrain.model.experts.apart import IMPLEMENTATION
from megatrain.store.precision import Precision
from megatrain.store.state import HostState
from megatrain.stream.forward.arrangement import Arrangement, residents_of
from megatrain.stream.memory import require_device_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

_OR_WHOLE = " and expert_chunks=1"


def require_drives(choice: Choice) -> None:
    """Refuse a choice of which something waits on drives, for a run that has none.

    Raises:
        ConfigError: Something of the choice waits on drives.
    """
    for name, instead in WITHOUT_DRIVES.items():
        value = choice.given.get(name, "")
        if value == "nvme" or (name == "gradients" and "nvme" in value):
            raise ConfigError(
                f"{name} is nvme, but there are no drives; name a directory on each of them (memory.tiers="
                f"{{nvme: [DIRECTORY]}}, or tiers=Tiers(nvme=...)), or use {name}={instead}"
            )


def check_choice(choice: Choice, blocks: Sequence[Block], *, compiles: bool = False) -> None:
    """Refuse a choice that an engine cannot run.

    Args:
        choice: The choice that is wanted.
        blocks: The blocks of the model, from `find_blocks(model, **choice.split)`.
        compiles: A claim that layers run through `torch.compile`.

    Raises:
        ConfigError: The choice is not resolved, does not fit the model, or contradicts itself.
    """
    layers = group_layers(blocks)
    choice.require_resolved("an engine")
    checked(choice.for_layers(len(layers)))
    together = [num_together(blocks, layer) for layer in layers]
    most, most_gradients = (max(numbers) for numbers in zip(*together, strict=True))
    if choice.num_slots < most:
        raise ConfigError(
            f"num_slots is {choice.num_slots}, but {most} fragments of a layer are on the device together in "
            f"its backward; use num_slots={most} or more, or fragments=False{_OR_WHOLE}"
        )
    if choice.lockstep > 1 and choice.num_gradient_buffers < most_gradients:
        raise ConfigError(
            f"num_gradient_buffers is {choice.num_gradient_buffers}, but gradients of {most_gradients} "
            f"fragments of a layer add up at the same time; use {most_gradients} or more, or "
            f"fragments=False{_OR_WHOLE}"
        )
    dropping = [policy.name for n, policy in enumerate(choice.policies) if policy.drops(n)]
    if choice.expert_chunks > 1 and dropping:
        raise ConfigError(
            f"activations={dropping[0]} makes the input of a layer again by running those before it, and "
            "their experts come in chunks, which micro-batches pass together; use activations=recompute, or "
            "expert_chunks=1"
        )
    if choice.expert_chunks > 1 and not any(num_chunks(blocks, layer) for layer in layers):
        raise ConfigError(
            f"expert_chunks is {choice.expert_chunks}, but no layer of the model has experts that come apart "
            f"(its experts run as {IMPLEMENTATION}, in parts of whole pages); use expert_chunks=1"
        )
    elsewhere = [place for place in choice.gradients if place != "host"]
    if elsewhere and choice.updates == "immediate":
        raise ConfigError(
            f"gradients={elsewhere[0]} lets gradients wait for the norm, and updates=immediate uses them up "
            "at once; use gradients=host, or updates=deferred"
        )
    if elsewhere and choice.sums == "host":
        raise ConfigError(
            f"gradients={elsewhere[0]} lets complete gradients wait there for the norm, and sums=host "
            "completes them on the host; use gradients=host, or sums=device"
        )
    if choice.outer_streams and (choice.outer_resident or not all(ends_of(blocks))):
        why = "outer_resident keeps them" if choice.outer_resident else "they are tied, or used elsewhere"
        raise ConfigError(
            f"outer_streams lets embedding and head stream through the slots, but {why}; use "
            "outer_streams=False"
        )
    problems = [policy.compile_problem for policy in choice.policies if policy.compile_problem]
    if compiles and problems:
        raise ConfigError(problems[0])


def check_runs(choice: Choice, num_runs: int) -> None:
    """Refuse a choice that cannot add up gradients in so many runs.

    Raises:
        ConfigError: The host adds them up, or drives have no room for several sums of a gradient.
    """
    if num_runs > 1 and choice.sums != "device":
        does = (
            "lets the host add up gradients" if choice.sums == "host" else "has room for one sum of a block"
        )
        raise ConfigError(
            f"sums={choice.sums} {does}, but a step has {num_runs} runs, whose sums are "
            "joined on the device; use sums=device, or parallel.shards=1 (StepBatch(num_runs=1))"
        )


def say_what_runs_twice(
    model: PreTrainedModel, choice: Choice, device: torch.device, precision: Precision
) -> None:
    """Say if a choice is to keep what attention returns, and the model's attention returns nothing for it."""
    asked = [policy for policy in choice.policies if policy.keeps_attention_alone]
    dtype = torch.float32 if precision is Precision.FP32 else torch.bfloat16
    why = why_none(model, device, dtype) if asked else ""
    if why:
        warn_once(_log, runs_twice(model.config.get_text_config().model_type, asked[0].name, why))


def uncompiled(compile: str, sequence: int) -> str:
    """Return the setting `compile` of ranks that share out rows: inside attention they wait for each other.

    Raises:
        ConfigError: The setting is `on`.
    """
    if compile == "on":
        raise ConfigError(
            f"compile is on and parallel.sequence is {sequence}: ranks exchange tokens inside each layer, "
            "which is not compiled; use compile=off, or parallel.sequence=1"
        )
    return "off"


def changed(choice: Choice, old: Choice, num_blocks: int) -> Choice:
    """Return a choice as an engine can go on with it, whose state stays as it is.

    Args:
        choice: The choice that is wanted. Planes on drives of which RAM holds every block are in RAM.
        old: The choice that is in force.
        num_blocks: The number of blocks of the model.

    Raises:
        ConfigError: Fields are open, or the state would have to be another.
    """
    choice.require_resolved("engine.reconfigure")
    for name in ("fragments", "expert_chunks"):
        wanted, is_laid_out = getattr(choice, name), getattr(old, name)
        if wanted != is_laid_out:
            raise ConfigError(
                f"{name} is {wanted}, but the state is laid out for {name}={is_laid_out}; "
                "detach the engine, and attach again"
            )
    if choice.head_chunk_tokens not in (None, old.head_chunk_tokens):
        raise ConfigError(
            f"head_chunk_tokens is {choice.head_chunk_tokens}, and was {old.head_chunk_tokens}: the loss "
            "would be rounded in another way; detach the engine, and attach again"
        )
    now_there, wanted = (c.has_state_on_drives(num_blocks) for c in (old, choice))
    if now_there != wanted:
        raise ConfigError(
            f"the choice puts {'a part' if wanted else 'nothing'} of the state on drives (tiers), where "
            f"{'a part' if now_there else 'nothing'} of it is; detach the engine, and attach again"
        )
    for one, other in ((choice, old), (old, choice)):
        alone = (other.resident_layers, other.outer_resident, other.mirror_resident)
        if one.has_state_on_device and (one.resident_layers, one.outer_resident, False) != alone:
            raise ConfigError(
                "the state of resident blocks is on the device alone (mirror_resident=False), so the same "
                "blocks have to stay there; detach the engine, and attach again"
            )
    kept = ("head_chunk_tokens", "tiers", "blocks_in_ram", "weights_in_ram")
    return replace(choice, **{name: getattr(old, name) for name in kept})


def as_placed(choice: Choice, host: HostState) -> Choice:
    """Return a choice with what the store has put on drives, if there are any."""
    if not host.has_drives:
        return choice
    placement, num_blocks = host.on_drives.placement, len(host.layouts)
    num_state, num_weights = len(placement.state_on_drives), len(placement.working_on_drives)
    planes = [*(("remainder", "moments") if num_state else ()), *(("working",) if num_weights else ())]
    return replace(
        choice,
        tiers=frozenset((plane, "nvme") for plane in planes),
        blocks_in_ram=num_blocks - num_state if num_state else 0,
        weights_in_ram=num_blocks - num_weights if num_weights else 0,
    )


def check_change(choice: Choice, arrangement: Arrangement, *, compiles: bool) -> None:
    """Refuse a choice that an engine cannot go on with.

    Args:
        choice: The choice that is wanted, from `changed`.
        arrangement: The arrangement that is there.
        compiles: A claim that layers run through `torch.compile`.

    Raises:
        ConfigError: The engine cannot go on with it.
        CapacityError: The device does not hold it, though what is there now is free then.
    """
    blocks, lanes = arrangement.binding.blocks, arrangement.lanes
    check_choice(choice, blocks, compiles=compiles)
    check_runs(choice, arrangement.binding.job.runs.number)
    residents = residents_of(choice, blocks)
    if residents and arrangement.host.has_drives:
        raise ConfigError(
            "blocks cannot become resident: the state is on drives, from where none goes to the device "
            "for good; use resident_layers=0 and outer_resident=False"
        )
    if arrangement.scratch is None:
        require_drives(choice)
    require_device_memory(
        blocks,
        arrangement.host.layouts,
        lanes,
        choice,
        residents,
        arrangement.binding.job,
        held=lanes.device_bytes,
    )


def check_updates(updates: str, max_grad_norm: float | None) -> None:
    """Refuse a schedule that cannot clip to clip.

    Raises:
        ConfigError: `immediate` with clipping.
    """
    if updates == Updates.IMMEDIATE.value and max_grad_norm is not None:
        raise ConfigError(
            f"updates=immediate cannot clip (max_grad_norm is {max_grad_norm}): a block is updated before "
            "the norm of all gradients is known; use updates=deferred, or max_grad_norm=null"
        )


def choose_updates(
    arrangement: Arrangement, updates: str | None, *, max_grad_norm: float | None, compiles: bool
) -> None:
    """Let blocks be updated when `updates` says; None: as was chosen before.

    Raises:
        ConfigError: That is no schedule, or cannot be with the rest.
    """
    updates = read_member(Updates, updates or arrangement.choice.updates, "updates").value
    check_updates(updates, max_grad_norm)
    choice = replace(arrangement.choice, updates=updates)
    check_choice(choice, arrangement.binding.blocks, compiles=compiles)
    arrangement.choice = choice
    arrangement.executor.spec = replace(arrangement.executor.spec, updates=updates)


def refuse_on_drives(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state does not go on drives.

    Raises:
        ConfigError: The state does not go on drives.
    """
    if not optimizer.goes_on_drives:
        kept = " or ".join(each.state for each in OPTIMIZERS[optimizer.name] if each.goes_on_drives)
        raise ConfigError(
            f"optim.state is {optimizer.state}, but state on drives (memory.tiers.nvme) is kept in {kept}; "
            f"use optim.state={kept}, or no drives"
        )


def choose_optimizer(arrangement: Arrangement, name: str | None, state: str | None) -> Optimizer:
    """Return the optimizer of a name, with its state in a format; None: what memory was planned for.

    Raises:
        ConfigError: It would take more memory than was planned, or ranks would have no whole shares of its
            scales.
    """
    planned = arrangement.binding.job.optimizer
    name = planned.name if name is None else name
    if state is None and name != planned.name:
        raise ConfigError(
            f"the optimizer is {name}, but memory was planned for {planned.name}; give megatrain.attach "
            f"optimizer={name!r}"
        )
    chosen = planned if state is None else find(name, state)
    executor = arrangement.executor
    sizes = [layout.sizes for layout in executor.host.layouts]
    need, room = (sum(size.optimizer_bytes(kind) for size in sizes) for kind in (chosen, planned))
    has_shares = executor.gradients.shared.ranks.size > 1 and chosen.has_scales
    if need > room or (has_shares and planned != chosen):
        raise ConfigError(
            f"state is {chosen.state}, but memory was planned for {planned.state}"
            f"{', which is smaller' if need > room else ', and shared out among ranks so'}; call "
            f"megatrain.attach with optimizer_state={chosen.state!r}"
        )
    return chosen
