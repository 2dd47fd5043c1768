"""Ties a model to host state: its parameters become views of the working plane."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatrain.config.choice import Choice
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT, OPTIMIZERS
from megatrain.config.runs import Runs, StepSums, SumRoom
from megatrain.distributed.alone import ALONE
from megatrain.errors import CapacityError, ConfigError, ModelError
from megatrain.hardware import GIB, host_memory
from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.ownership import node_totals
from megatrain.layout.totals import BlockTotals, GradientPlaces
from megatrain.model.blocks import Block
from megatrain.model.layouts import lay_out_blocks
from megatrain.model.weights.built import cast_buffers
from megatrain.store.digests import drop_remainders_of_changed
from megatrain.store.placement import Tiers
from megatrain.store.state import HostState, Precision
from megatrain.stream.forward.arrangement import places_of, residency_of
from megatrain.stream.forward.attached import Binding
from megatrain.stream.ranks.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megatrain.stream.lanes import Lanes

_log = logging.getLogger(__name__)

_ACTIVATIONS_SHARE = 0.8
"""Of the host memory that the state leaves; the rest is for data, libraries and the system."""


def bind(
    model: PreTrainedModel,
    blocks: list[Block],
    layouts: list[BlockLayout],
    precision: Precision,
    choice: Choice,
    residents: Collection[int],
    *,
    runs: Runs | None = None,
    host_limit: int | None = None,
    optimizer: Optimizer = DEFAULT,
    tiers: Tiers | None = None,
    ranks: Ranks = ALONE,
    sequence: int = 1,
) -> Binding:
    """Move a model's parameters into host state, one at a time; a model from `load` is there already.

    Args:
        model: The model with its weights.
        blocks: The model's blocks.
        layouts: The layouts of the blocks.
        precision: The precision in which the weights are kept.
        choice: The choice by which the model will stream.
        residents: The numbers of the blocks that are updated on the device.
        runs: The runs of a step; None: one micro-batch.
        host_limit: The number of bytes that the whole state may take; None: what the machine has.
        optimizer: The optimizer for whose state there must be room.
        tiers: The tiers, which say what goes to drives; None: nothing does.
        ranks: The ranks that keep one state; the values are those of the first one's model on each node.
            None: there is one rank.
        sequence: The number of neighbours among the ranks that share out rows.

    Raises:
        ModelError: Weights that were never loaded, or a dtype that is no float.
        CapacityError: The state, optimizer included, does not fit into host memory, or what `tiers` says;
            nothing was allocated.
        ConfigError: The model was loaded for other tiers.
    """
    runs = Runs() if runs is None else runs
    sum_room = kept_sums(choice, runs, precision, ranks, sequence)
    places = places_of(choice, blocks, layouts, runs.num_micro_batches)
    tiers = None if tiers is None else with_gradients(tiers, places)
    fits = partial(
        require_host_memory,
        layouts,
        precision,
        sum_room=sum_room,
        places=places,
        limit=host_limit,
        optimizer=optimizer,
        tiers=tiers,
        ranks=ranks,
    )
    loaded: HostState | None = model.__dict__.get("_megatrain_host")
    is_for_this = loaded is not None and loaded.is_for(layouts, precision, tiers, optimizer)
    if loaded is not None:
        drop_remainders_of_changed(loaded)
    if loaded is not None and is_for_this:
        binding = Binding(blocks, loaded, optimizer, runs, ranks, sequence)
        if loaded.has_drives or loaded.is_parted or binding.moved is None:
            binding.check()
            fits(held=loaded.host_bytes)
            loaded.limit = host_limit
            return binding
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(f"parameter {name} has no data (it is on the meta device); use megatrain.load")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"parameter {name} is {parameter.dtype}; weights must be float32, bfloat16 or float16"
            )
    given = sum(parameter.nbytes for parameter in model.parameters())
    fits(held=0 if loaded is not None else given)
    host = HostState(layouts, precision, tiers=tiers, optimizer=optimizer, sum_room=sum_room, ranks=ranks)
    fills = ranks.local_rank == 0
    cast_buffers(model, torch.bfloat16 if precision is Precision.BF16 else torch.float32)
    rounded: list[str] = []
    with torch.no_grad():
        for block, state in zip(blocks, host.blocks, strict=True):
            for entry in state.layout.entries:
                parameter = block.parameters[entry.name]
                master = _master(loaded, entry.name, parameter) if fills else None
                if master is not None and entry.dtype == torch.bfloat16 and entry.state_offset is None:
                    if not torch.equal(master, parameter.data.float()):
                        rounded.append(entry.name)
                    master = None  # frozen weights stay the ones that are computed with
                if fills:
                    host.put(entry.name, parameter.data if master is None else master)
                parameter.data = state.weight(entry)
    if rounded:
        _log.warning(
            "%d parameters, %s among them, were trained in bf16 and are frozen now: their fp32 masters are "
            "dropped, and they stay as they are in bf16; to keep the masters, freeze after megatrain.attach",
            len(rounded),
            rounded[0],
        )
    model.__dict__["_megatrain_host"] = host
    require_same_weights(host, ranks)
    host.limit = host_limit
    return Binding(blocks, host, optimizer, runs, ranks, sequence)


def require_same_weights(host: HostState, ranks: Ranks) -> None:
    """Wait until every node has its weights, which may take long, and refuse other ones on one of them.

    Raises:
        ConfigError: The weights differ.
    """
    sums = torch.zeros(len(host.blocks), dtype=torch.int64)
    if ranks.num_nodes > 1 and ranks.local_rank == 0:
        sums = torch.stack([block.working.view(torch.int64).sum() for block in host.blocks])
    first, *others = ranks.gather(sums, "orders")[:: ranks.size // ranks.num_nodes]
    for node, found in enumerate(others, start=1):
        for block in (found != first).nonzero().flatten().tolist()[:1]:
            raise ConfigError(
                f"node {node} has other weights than node 0, such as in the block of "
                f"{host.layouts[block].entries[0].name}; give every node the same model files"
            )


def kept_sums(
    choice: Choice, runs: Runs, precision: Precision, ranks: Ranks = ALONE, sequence: int = 1
) -> SumRoom:
    """Return the room for partial sums in fp32 that a step keeps between rounds, beside complete gradients.

    Args:
        choice: The choice by which the model streams.
        runs: The runs of a rank's part of the step.
        precision: The precision in which weights are kept.
        ranks: The ranks that train together; None: there is one.
        sequence: The number of neighbours among them that share out rows.
    """
    on_drives = choice.sums == "nvme"
    sums = StepSums.of(runs, choice.lockstep, ranks.size, sequence, on_drives=on_drives)
    return sums.between(is_wide=precision is Precision.BF16)


def with_gradients(tiers: Tiers, places: GradientPlaces) -> Tiers:
    """Let a placement count on the gradients that will wait in RAM; the caller may count on none at all."""
    tiers = replace(tiers, sums_on_drives=frozenset(places.sums_on_drives))
    if not tiers.keeps_gradients:  # all of them pass through the buffers
        return replace(tiers, gradients_in_ram=frozenset())
    staged = frozenset(places.staged)
    return replace(tiers, gradients_in_ram=frozenset(places.on_host), gradients_staged=staged)


def _master(loaded: HostState | None, name: str, parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's exact fp32 value if earlier host state has it; None: the parameter is all."""
    if loaded is not None and loaded.has(name):
        state, entry = loaded.find(name)
        if parameter.data_ptr() == state.weight(entry).data_ptr():
            return state.master(entry)
    return None


def plan_layouts(model: PreTrainedModel, blocks: Sequence[Block], precision: Precision) -> list[BlockLayout]:
    """Lay out every block; bf16 leaves parameters in fp32 that the model keeps so."""
    return lay_out_blocks(model, blocks, splits=precision is Precision.BF16)


def require_host_memory(
    layouts: Sequence[BlockLayout],
    precision: Precision,
    *,
    held: int,
    places: GradientPlaces,
    sum_room: SumRoom,
    limit: int | None = None,
    optimizer: Optimizer = DEFAULT,
    tiers: Tiers | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Check the predicted bytes of a run against the given limit, the machine and its cgroups.

    Args:
        layouts: All blocks.
        precision: The precision in which weights are kept.
        held: The number of bytes that are taken already and will be part of the state, or given back.
        places: The places where complete gradients wait.
        sum_room: The room for partial sums in fp32 that are kept between rounds, beside complete gradients.
        limit: The number of bytes that the whole state may take; None: what the machine has.
        optimizer: The optimizer for whose state there must be room.
        tiers: The tiers, with which state goes to drives too, and `HostState` checks what is left; None:
            nothing goes to drives.
        ranks: The ranks that keep one state; None: there is one.

    Raises:
        CapacityError: The state does not fit.
    """
    if tiers is not None:
        return
    planes = host_planes(layouts, precision, places, sum_room=sum_room, optimizer=optimizer, ranks=ranks)
    total = sum(planes.values())
    parts = ", ".join(f"{plane} {size / GIB:.2f}" for plane, size in planes.items() if size)
    advice = (
        "train.precision=bf16 (14 instead of 16 bytes per parameter), " if precision is Precision.FP32 else ""
    )
    saved = {
        other.state: optimizer.bytes_per_element - other.bytes_per_element
        for other in OPTIMIZERS[optimizer.name]
        if other.compresses(optimizer)
    }
    if saved:
        numbers = " or ".join(f"{nbytes:.0f}" for nbytes in saved.values())
        advice += f"optim.state={' or '.join(saved)} ({numbers} bytes per parameter less, not exact), "
    if places.on_host:
        advice += "memory.gradients=device, "
    remedy = f"use {advice}a smaller model, or freeze parameters"
    if limit is not None and total > limit:
        raise CapacityError(
            f"host memory: the state takes {total / GIB:.2f} GiB ({parts}), but memory.host_limit is "
            f"{limit / GIB:.2f} GiB; {remedy}"
        )
    machine = host_memory()
    if total - held > machine.available_bytes:
        raise CapacityError(
            f"host memory: training needs {(total - held) / GIB:.2f} GiB more (state in GiB: {parts}), but "
            f"{machine.source} leaves {machine.available_bytes / GIB:.2f} GiB; {remedy}"
        )


def host_planes(
    layouts: Sequence[BlockLayout],
    precision: Precision,
    places: GradientPlaces,
    *,
    sum_room: SumRoom,
    optimizer: Optimizer,
    ranks: Ranks = ALONE,
) -> dict[str, int]:
    """Return the bytes of each plane of a state that is in RAM; arguments as in `require_host_memory`."""
    sizes = [layout.sizes for layout in layouts]
    kept = node_totals(sizes, ranks.size, ranks.num_nodes, ranks.node)
    return pools.host_planes(BlockTotals(sizes)[:], places, optimizer, room=sum_room, kept=kept)


def room_for_activations(binding: Binding, choice: Choice) -> int:
    """Return the host bytes that saved activations may take: most of what the state will leave."""
    host = binding.host
    if host.has_drives:
        to_come = sum(host.on_drives.placement.ram_bytes.values()) - host.host_bytes
        return max(0, int(_ACTIVATIONS_SHARE * (host_memory().available_bytes - to_come)))
    kept = binding.sums(choice).between(is_wide=host.precision is Precision.BF16)
    planes = host_planes(
        host.layouts,
        host.precision,
        places_of(choice, binding.blocks, host.layouts),
        sum_room=pools.ONE_SUM if kept == SumRoom() else kept,
        optimizer=binding.optimizer,
        ranks=binding.ranks,
    )
    to_come = sum(planes.values()) - planes["working"] - planes["remainder"]
    return max(0, int(_ACTIVATIONS_SHARE * (host_memory().available_bytes - to_come)))


def require_device_memory(
    blocks: Sequence[Block],
    layouts: Sequence[BlockLayout],
    lanes: Lanes,
    choice: Choice,
    residents: Collection[int],
    *,
    optimizer: Optimizer = DEFAULT,
    sums: StepSums | None = None,
    held: int = 0,
) -> None:
    """Check the predicted bytes of slots, resident blocks and gradient buffers against the device's limit.

    Gradients of several micro-batches, or of a round of several, add up in fp32. `held` bytes in use will
    have been given back.

    Raises:
        CapacityError: The pools do not fit; nothing was allocated.
    """
    limit = lanes.available_bytes()
    if limit is None:
        return
    limit += held
    sums = StepSums(Runs(), (1,)) if sums is None else sums
    is_wide = max(choice.lockstep, sums.runs.num_micro_batches) > 1 or sums.num_ranks > 1
    sizes = pools.device_pools(
        residency_of(blocks, layouts, residents, streams_outer=choice.outer_streams),
        num_slots=choice.num_slots,
        num_gradient_buffers=choice.num_gradient_buffers,
        is_wide=is_wide or choice.outer_streams,
        waiting=places_of(choice, blocks, layouts).on_device,
        optimizer=optimizer,
        room=sums.on_device,
        num_ranks=sums.num_ranks,
    )
    need = sum(sizes.values())
    if need > limit:
        parts = ", ".join(f"{pool} {size / GIB:.3f}" for pool, size in sizes.items() if size)
        raise CapacityError(
            f"device memory: {need / GIB:.3f} GiB are needed before activations ({parts}), but the limit is "
            f"{limit / GIB:.3f} GiB; use {_smaller(choice, residents, blocks)}, or a larger device"
        )


def _smaller(choice: Choice, residents: Collection[int], blocks: Sequence[Block]) -> str:
    """Name what would take less device memory."""
    options = []
    if "device" in choice.gradients:
        options.append("memory.gradients=host")
    if residents:
        options.append("memory.resident_blocks=0")
    if choice.num_slots > 1 and not any(block.entries for block in blocks):
        options.append("memory.num_slots=1")
    if not any(block.entries for block in blocks):
        options.append("memory.fragments=true")
    return ", ".join([*options, "train.precision=bf16"])
