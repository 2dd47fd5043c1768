"""The bytes that a choice takes on the device and on the host: the engine's own rules, as arithmetic.

Pools that the engine allocates are exact. What comes and goes is the largest of the step's moments.
"""

from __future__ import annotations

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.config.plan import Pool
from megatrain.config.policies import POLICIES
from megatrain.layout import pools
from megatrain.layout.host_buffers import NUM_ACTIVATION_STAGING
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.memory.device_peaks import DevicePeaks
from megatrain.plan.memory.layer_runs import layer_runs


def device_peak_bytes(
    anatomy: Anatomy,
    choice: Choice,
    batch: StepBatch,
    *,
    optimizer: Optimizer = DEFAULT,
    overlaps: bool = True,
    has_scratch: bool = True,
) -> list[Pool]:
    """Return the device's pools, as they are when all together are largest.

    Args:
        anatomy: The anatomy of the model, for micro-batches as `batch` has them.
        choice: The choice, with one policy per layer.
        batch: The batch of a step.
        optimizer: The optimizer of the run.
        overlaps: Whether the lanes run at the same time, as on a GPU; see `DevicePeaks`.
        has_scratch: Whether updates on the device take scratch memory; see `DevicePeaks`.
    """
    found = allocated(anatomy, choice, batch, optimizer)
    peaks = DevicePeaks(anatomy, choice, batch, optimizer, overlaps=overlaps, has_scratch=has_scratch)
    largest = peaks.largest
    found += [
        Pool(tier="device", name="boundaries", nbytes=largest.boundaries, is_exact=False),
        Pool(tier="device", name="saved activations", nbytes=largest.saved, is_exact=False),
        Pool(tier="device", name=f"working memory ({largest.name})", nbytes=largest.working, is_exact=False),
    ]
    return [pool for pool in found if pool.nbytes]


def host_planes(
    anatomy: Anatomy, choice: Choice, batch: StepBatch, *, optimizer: Optimizer = DEFAULT
) -> dict[str, int]:
    """Return the bytes of every plane of state on the host, and of what waits there of activations.

    Planes that are on a drive are counted too: `Choice.tier` says where each is.
    """
    block_sums = BlockSums.of(anatomy, choice)
    blocks, kept = block_sums.residency(choice), block_sums.kept_by_node(batch)
    planes = pools.host_planes(
        blocks.all,
        block_sums.gradient_places(choice, batch.num_micro_batches),
        optimizer,
        kept=kept,
        room=batch.sums(choice).between(is_wide=anatomy.precision == "bf16"),
        residents=blocks.resident,
        mirrors=choice.mirror_resident,
    )
    if kept is not None:  # of a block that is saved, what other nodes keep comes here for that long
        planes["state of other nodes"] = blocks.all.largest(pools.resident_state, optimizer)
    together = min(choice.lockstep, batch.num_micro_batches)
    boundary, offloaded = 0, 0
    if choice.boundaries != "device" or _offloads(choice):
        runs = layer_runs(anatomy, choice)
        if choice.boundaries == "nvme":
            largest = max(run.host_bytes for run in runs)
            return planes | {"staging of activations": NUM_ACTIVATION_STAGING * pools.saved_buffer(largest)}
        boundary = together * sum(run.host_bytes for run in runs if run.is_boundary_on_host)
        offloaded = together * sum(run.host_bytes for run in runs) - boundary
    return planes | {"boundaries": boundary, "activations": offloaded}


def _offloads(choice: Choice) -> bool:
    return any(POLICIES[name].is_offloaded for name in set(choice.activations))


def allocated(anatomy: Anatomy, choice: Choice, batch: StepBatch, optimizer: Optimizer) -> list[Pool]:
    """Return what the engine allocates and keeps."""
    block_sums = BlockSums.of(anatomy, choice)
    sizes = pools.device_pools(
        block_sums.residency(choice),
        num_slots=choice.num_slots,
        num_gradient_buffers=choice.num_gradient_buffers,
        is_wide=batch.adds_up or choice.outer_streams,
        waiting=block_sums.gradient_places(choice, batch.num_micro_batches).on_device,
        optimizer=optimizer,
        room=batch.sums(choice).on_device,
        num_ranks=batch.num_ranks,
    )
    return [Pool(tier="device", name=name, nbytes=nbytes) for name, nbytes in sizes.items()]
