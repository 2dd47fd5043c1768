"""The pools of a choice in RAM and on drives: planes of state that are away are in RAM for some blocks."""

from __future__ import annotations

from dataclasses import replace

from megatrain.model.profile.anatomy import Anatomy
from megatrain.layout.host_buffers import SCRATCH_CHUNK_BYTES, padded, state_bytes
from megatrain.layout.moments import Moments, moment_plane_bytes
from megatrain.plan.memory.block_sums import Census
from megatrain.config.choice import Batch, Choice, Pool
from megatrain.plan.memory.device_pools import host_planes
from megatrain.plan.memory.visit_bytes import visit_bytes

_PEAKS = ("boundaries", "activations", "staging of activations")


def host_pools(anatomy: Anatomy, choice: Choice, batch: Batch, state: Moments) -> list[Pool]:
    """Return the pools in RAM, where moments are kept in a format."""
    census = Census.of(anatomy, choice.fragments)
    sizes = host_planes(anatomy, choice, batch, state=state)
    if choice.tiers:
        sizes |= _placed(census, choice)
    elif choice.boundaries == "nvme":  # a run with drives commits its state there, wherever it lives
        sizes |= _buffers(census, replace(choice, blocks_in_ram=census.num_blocks))
    return [
        Pool("ram", name, nbytes, is_exact=name not in _PEAKS) for name, nbytes in sizes.items() if nbytes
    ]


def drive_pools(anatomy: Anatomy, choice: Choice, batch: Batch) -> list[Pool]:
    """Return what is on the drives: two copies of everything, so that a commit is whole."""
    if not choice.tiers and choice.boundaries != "nvme":
        return []
    census = Census.of(anatomy, choice.fragments)
    pools = [Pool("nvme", "two copies of the state", 2 * _all_bytes(census))]
    return pools + ([_scratch(anatomy, choice, batch)] if choice.boundaries == "nvme" else [])


def _scratch(anatomy: Anatomy, choice: Choice, batch: Batch) -> Pool:
    """Return the room for saved activations: one copy, in whole chunks."""
    visits = [padded(visit_bytes(anatomy, choice, number)) for number in range(len(anatomy.layers))]
    chunks = sum(-(-visit // SCRATCH_CHUNK_BYTES) for visit in visits)
    together = min(choice.lockstep, batch.num_micro_batches)
    return Pool("nvme", "saved activations", together * chunks * SCRATCH_CHUNK_BYTES, is_exact=False)


def _all_bytes(census: Census) -> int:
    """Return the bytes of all blocks' state on a drive, counted once."""
    if ("all",) not in census.placed:
        nbytes = sum(
            state_bytes(block.num_split, block.num_state) + padded(block.size.fetch_bytes)
            for block in census.blocks
        )
        census.placed["all",] = {"image": nbytes}
    return census.placed["all",]["image"]


def placed_bytes(anatomy: Anatomy, choice: Choice) -> int:
    """Return what of `host_pools` depends on `blocks_in_ram` and `weights_in_ram`."""
    return sum(_placed(Census.of(anatomy, choice.fragments), choice).values())


def _placed(census: Census, choice: Choice) -> dict[str, int]:
    """Return the pools in RAM that what is on drives decides: those of a placement are counted once."""
    key = (choice.tier("working"), choice.blocks_in_ram, choice.weights_in_ram)
    if key not in census.placed:
        census.placed[key] = _in_ram(census, choice) | _buffers(census, choice)
    return census.placed[key]


def _in_ram(census: Census, choice: Choice) -> dict[str, int]:
    """Return the bytes of the planes that are in RAM though others are on drives: the largest blocks'.

    State on drives is kept in fp32.
    """
    blocks = [census.blocks[number] for number in census.by_size]
    with_state = blocks[: choice.blocks_in_ram]
    with_weights = blocks[: choice.weights_in_ram] if choice.tier("working") == "nvme" else blocks
    num_state = sum(block.num_state for block in with_state)
    return {
        "working": sum(block.size.fetch_bytes for block in with_weights),
        "remainder": 2 * sum(block.num_split for block in with_state),
        **moment_plane_bytes(num_state, 0, Moments.FP32),
    }


def _buffers(census: Census, choice: Choice) -> dict[str, int]:
    """Return the bytes of the buffers before the drives."""
    weights_in_ram = choice.weights_in_ram if choice.tier("working") == "nvme" else census.num_blocks
    return {
        "staging of state": census.drive_buffers.staging_bytes(weights_in_ram, choice.blocks_in_ram),
        "staging of weights": census.drive_buffers.page_bytes(weights_in_ram),
    }
