"""The pools of a choice in RAM and on drives: planes of state that are away are in RAM for some blocks."""

from __future__ import annotations

from megatrain.model.anatomy import Anatomy
from megatrain.model.host_buffers import padded, state_bytes
from megatrain.model.moments import Moments, moment_plane_bytes
from megatrain.plan.census import Census
from megatrain.plan.choice import Batch, Choice, Pool
from megatrain.plan.memory import host_planes

_PEAKS = ("boundaries", "activations")


def host_pools(anatomy: Anatomy, choice: Choice, batch: Batch, state: Moments) -> list[Pool]:
    """Return the pools in RAM, where moments are kept in a format."""
    census = Census.of(anatomy, choice.fragments)
    sizes = host_planes(anatomy, choice, batch, state=state)
    if choice.tiers:
        sizes |= _in_ram(census, choice) | _buffers(census, choice)
    return [
        Pool("ram", name, nbytes, is_exact=name not in _PEAKS) for name, nbytes in sizes.items() if nbytes
    ]


def drive_pools(anatomy: Anatomy, choice: Choice) -> list[Pool]:
    """Return what is on the drives: two copies of everything, so that a commit is whole."""
    if not choice.tiers:
        return []
    census = Census.of(anatomy, choice.fragments)
    nbytes = sum(
        state_bytes(block.num_split, block.num_state) + padded(block.size.fetch_bytes)
        for block in census.blocks
    )
    return [Pool("nvme", "two copies of the state", 2 * nbytes)]


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
