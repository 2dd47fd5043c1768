"""All pools of a choice, in the tier where each of them is."""

from __future__ import annotations

from dataclasses import replace

from megatrain.model.anatomy import Anatomy
from megatrain.model.host_buffers import padded, state_bytes
from megatrain.plan.census import Census
from megatrain.plan.choice import Batch, Choice, Pool
from megatrain.plan.memory import device_peak_bytes, host_planes

_MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Of one moment of a parameter; int8 has scales beside."""

_PEAKS = ("boundaries", "activations")


def device_pools(
    anatomy: Anatomy, choice: Choice, batch: Batch, *, state: str, overlaps: bool = True
) -> list[Pool]:
    """Return the device's pools; see `device_peak_bytes`."""
    pools = device_peak_bytes(anatomy, choice, batch, overlaps=overlaps)
    if state == "fp32":
        return pools
    census = Census.of(anatomy, choice.fragments)
    saved = 2 * (4 - _MOMENT_BYTES[state]) * census.state_on_device(choice)
    if state == "int8":
        saved -= 2 * 4 * census.scales_on_device(choice)
    return [
        replace(pool, nbytes=pool.nbytes - saved) if pool.name == "resident optimizer state" else pool
        for pool in pools
    ]


def host_pools(anatomy: Anatomy, choice: Choice, batch: Batch, *, state: str) -> list[Pool]:
    """Return the pools in RAM."""
    census = Census.of(anatomy, choice.fragments)
    sizes = host_planes(anatomy, choice, batch)
    for plane in ("exp_avg", "exp_avg_sq"):
        sizes[plane] = sizes[plane] * _MOMENT_BYTES[state] // 4
        if state == "int8":
            sizes[f"{plane}_scale"] = 4 * census.num_scales(0, census.num_blocks)
    if choice.tiers:
        sizes |= _in_ram(census, choice) | _buffers(census, choice)
    return [
        Pool("ram", name, nbytes, is_exact=name not in _PEAKS) for name, nbytes in sizes.items() if nbytes
    ]


def drive_pools(anatomy: Anatomy, choice: Choice, batch: Batch, *, state: str) -> list[Pool]:
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
    """Return the bytes of the planes that are in RAM though others are on drives: the largest blocks'."""
    blocks = [census.blocks[number] for number in census.by_size]
    with_state = blocks[: choice.blocks_in_ram]
    with_weights = blocks[: choice.weights_in_ram] if choice.tier("working") == "nvme" else blocks
    num_state = sum(block.num_state for block in with_state)
    return {
        "working": sum(block.size.fetch_bytes for block in with_weights),
        "remainder": 2 * sum(block.num_split for block in with_state),
        "exp_avg": 4 * num_state,
        "exp_avg_sq": 4 * num_state,
    }


def _buffers(census: Census, choice: Choice) -> dict[str, int]:
    """Return the bytes of the buffers before the drives."""
    weights_in_ram = choice.weights_in_ram if choice.tier("working") == "nvme" else census.num_blocks
    return {
        "staging of state": census.drive_buffers.staging_bytes(weights_in_ram, choice.blocks_in_ram),
        "staging of weights": census.drive_buffers.page_bytes(weights_in_ram),
    }
