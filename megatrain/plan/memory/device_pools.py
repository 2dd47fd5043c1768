"""How many bytes a choice takes on the device and on the host: the engine's own rules, as arithmetic.

Pools that the engine allocates are exact. What comes and goes is the largest of the step's moments.
"""

from __future__ import annotations

from megatrain.config.choice import Choice, Pool, StepBatch
from megatrain.layout.blocks import aligned
from megatrain.layout.host_buffers import NUM_ACTIVATION_STAGING, NUM_GRADIENT_STAGING, padded
from megatrain.layout.moments import MomentFormat, moment_plane_bytes
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.memory.device_peaks import DevicePeaks
from megatrain.plan.memory.visit_bytes import policy_of, visit_bytes


def device_peak_bytes(
    anatomy: Anatomy,
    choice: Choice,
    batch: StepBatch,
    *,
    state: MomentFormat = MomentFormat.FP32,
    overlaps: bool = True,
    has_scratch: bool = True,
) -> list[Pool]:
    """Return the device's pools, as they are when all together are largest.

    Args:
        anatomy: Of the model, for micro-batches as `batch` has them.
        choice: With one policy per layer.
        batch: Of a step.
        state: How the moments of AdamW are kept.
        overlaps: The lanes run at the same time, as on a GPU; see `DevicePeaks`.
        has_scratch: Updates on the device take scratch memory; see there.
    """
    pools = _allocated(anatomy, choice, batch, state)
    moments = DevicePeaks(anatomy, choice, batch, overlaps=overlaps, has_scratch=has_scratch)
    largest = max(moments.all(), key=lambda moment: moment.nbytes)
    pools += [
        Pool(tier="device", name="boundaries", nbytes=largest.boundaries, is_exact=False),
        Pool(tier="device", name="saved activations", nbytes=largest.saved, is_exact=False),
        Pool(tier="device", name=f"working memory ({largest.name})", nbytes=largest.working, is_exact=False),
    ]
    return [pool for pool in pools if pool.nbytes]


def host_planes(
    anatomy: Anatomy, choice: Choice, batch: StepBatch, *, state: MomentFormat = MomentFormat.FP32
) -> dict[str, int]:
    """Return the bytes of every plane of state on the host, and of what waits there of activations.

    Planes that are on a drive are counted too: `Choice.tier` says where each is.
    """
    block_sums = BlockSums.of(anatomy, choice.fragments)
    stop = block_sums.num_blocks
    num_state = block_sums.num_state(0, stop)
    planes = {
        "working": block_sums.fetch_bytes(0, stop),
        "remainder": 2 * block_sums.num_split(0, stop),
        **moment_plane_bytes(num_state, block_sums.num_scales(0, stop), state),
    }
    num_rounds = -(-batch.num_micro_batches // choice.lockstep)
    if choice.gradients == "device" or (choice.updates == "immediate" and num_rounds == 1):
        planes["staging"] = NUM_GRADIENT_STAGING * aligned(block_sums.largest_offloaded_gradient(choice))
    else:
        planes["gradient"] = block_sums.gradient_bytes(0, stop)
    if num_rounds > 1 and anatomy.precision == "bf16":
        planes["accumulator"] = 4 * num_state
    together = min(choice.lockstep, batch.num_micro_batches)
    boundary, offloaded = 0, 0
    if choice.boundaries != "device" or "offload" in choice.activations:
        visits = [visit_bytes(anatomy, choice, number) for number in range(len(anatomy.layers))]
        if choice.boundaries == "nvme":
            return planes | {"staging of activations": NUM_ACTIVATION_STAGING * padded(max(visits))}
        offloaded = sum(
            together * visit
            for number, visit in enumerate(visits)
            if policy_of(anatomy, choice, number) == "offload"
        )
        boundary = together * sum(visits) - offloaded
    return planes | {"boundaries": boundary, "activations": offloaded}


def _allocated(anatomy: Anatomy, choice: Choice, batch: StepBatch, state: MomentFormat) -> list[Pool]:
    """Return what the engine allocates and keeps."""
    block_sums = BlockSums.of(anatomy, choice.fragments)
    first, outer, stop = block_sums.first_streamed(choice), block_sums.first_outer, block_sums.num_blocks
    wide = batch.num_micro_batches > 1
    ring = (
        4 * block_sums.largest("num_state", choice) if wide else block_sums.largest("offload_bytes", choice)
    )
    last = stop if choice.outer_resident else outer
    num_split = block_sums.num_split(0, first) + block_sums.num_split(outer, last)
    moments = moment_plane_bytes(
        block_sums.state_on_device(choice), block_sums.scales_on_device(choice), state
    )
    sizes = {
        "slots": choice.num_slots * block_sums.largest("fetch_bytes", choice),
        "resident weights": block_sums.fetch_bytes(0, first) + block_sums.fetch_bytes(outer, stop),
        "resident gradients": 4 * (block_sums.num_state(0, first) + block_sums.num_state(outer, stop)),
        "resident optimizer state": 2 * num_split + sum(moments.values()),
        "gradient buffers": choice.num_gradient_buffers * ring,
        "waiting gradients": block_sums.gradient_bytes(first, outer) if choice.gradients == "device" else 0,
    }
    return [Pool(tier="device", name=name, nbytes=nbytes) for name, nbytes in sizes.items()]
