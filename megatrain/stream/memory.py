"""The memory that a job needs, checked before any of it is taken."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from megatrain.config.choice import Choice
from megatrain.config.optimizers.registry import OPTIMIZERS
from megatrain.config.runs import SumRoom
from megatrain.errors import CapacityError
from megatrain.hardware import GIB, host_memory
from megatrain.layout import pools
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.ownership import node_totals
from megatrain.layout.totals import BlockTotals, GradientPlaces
from megatrain.model.blocks import Block
from megatrain.store.precision import Precision
from megatrain.stream.forward.arrangement import places_of, residency_of, residents_of
from megatrain.stream.forward.attached import Binding
from megatrain.stream.job.job import Job

if TYPE_CHECKING:
    from megatrain.stream.lanes import Lanes

_ACTIVATIONS_SHARE = 0.8
"""Of the host memory that the state leaves; the rest is for data, libraries and the system."""


def require_host_memory(
    job: Job,
    layouts: Sequence[BlockLayout],
    places: GradientPlaces,
    room: SumRoom,
    *,
    held: int,
    residents: Collection[int] = (),
    mirrors: bool = True,
) -> None:
    """Check the predicted bytes of a run against the given limit, the machine and its cgroups.

    Args:
        job: The job; with tiers, state goes to drives too, and `HostState` checks what is left.
        layouts: The layouts of all blocks.
        places: The places where complete gradients wait.
        room: The room for partial sums in fp32 that are kept between rounds, beside complete gradients.
        held: The number of bytes that are taken already and will be part of the state, or given back.
        residents: The blocks that are updated on the device.
        mirrors: Whether these have their places in RAM too.

    Raises:
        CapacityError: The state does not fit.
    """
    if job.tiers is not None:
        return
    optimizer, limit = job.optimizer, job.host_limit
    planes = host_planes(job, layouts, places, room, residents, mirrors=mirrors)
    total = sum(planes.values())
    parts = ", ".join(f"{plane} {size / GIB:.2f}" for plane, size in planes.items() if size)
    advice = (
        "train.precision=bf16 (14 instead of 16 bytes per parameter), "
        if job.precision is Precision.FP32
        else ""
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
    job: Job,
    layouts: Sequence[BlockLayout],
    places: GradientPlaces,
    room: SumRoom,
    residents: Collection[int] = (),
    mirrors: bool = True,
) -> dict[str, int]:
    """Return the bytes of each plane of a state that is in RAM; arguments as in `require_host_memory`."""
    sizes, ranks = [layout.sizes for layout in layouts], job.ranks
    kept = node_totals(sizes, ranks.size, ranks.num_nodes, ranks.node)
    totals = BlockTotals(sizes)
    return pools.host_planes(
        totals[:],
        places,
        job.optimizer,
        room=room,
        kept=kept,
        residents=totals.pick(sorted(residents)),
        mirrors=mirrors,
    )


def room_for_activations(binding: Binding, choice: Choice) -> int:
    """Return the host bytes that saved activations may take: most of what the state will leave."""
    host = binding.host
    if host.has_drives:
        to_come = sum(host.on_drives.placement.ram_bytes.values()) - host.host_bytes
        return max(0, int(_ACTIVATIONS_SHARE * (host_memory().available_bytes - to_come)))
    room = binding.job.sum_room(choice)
    places = places_of(choice, binding.blocks, host.layouts)
    sums = pools.ONE_SUM if room == SumRoom() else room
    residents = residents_of(choice, binding.blocks)
    planes = host_planes(binding.job, host.layouts, places, sums, residents, mirrors=choice.mirror_resident)
    to_come = sum(planes.values()) - planes["working"] - planes["remainder"]
    return max(0, int(_ACTIVATIONS_SHARE * (host_memory().available_bytes - to_come)))


def require_device_memory(
    blocks: Sequence[Block],
    layouts: Sequence[BlockLayout],
    lanes: Lanes,
    choice: Choice,
    residents: Collection[int],
    job: Job,
    *,
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
    sums = job.sums(choice)
    is_wide = max(choice.lockstep, sums.runs.num_micro_batches) > 1 or sums.num_ranks > 1
    sizes = pools.device_pools(
        residency_of(blocks, layouts, residents, streams_outer=choice.outer_streams),
        num_slots=choice.num_slots,
        num_gradient_buffers=choice.num_gradient_buffers,
        is_wide=is_wide or choice.outer_streams,
        waiting=places_of(choice, blocks, layouts).on_device,
        optimizer=job.optimizer,
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
