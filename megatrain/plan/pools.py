"""All pools of a choice, in the tier where each of them is."""

from __future__ import annotations

from dataclasses import replace

from megatrain.model.anatomy import Anatomy
from megatrain.plan.census import Block, Census
from megatrain.plan.choice import Batch, Choice, Pool
from megatrain.plan.memory import device_peak_bytes, host_planes
from megatrain.plan.step import NUM_STAGING

_MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Of one moment of a parameter; int8 has scales beside."""

PIECE_BYTES = 64 << 20
"""What is in RAM is committed in pieces of at most this."""

_PAGE = 4096

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
        sizes |= _placed(census, choice)
    return [
        Pool("ram", name, nbytes, is_exact=name not in _PEAKS) for name, nbytes in sizes.items() if nbytes
    ]


def drive_pools(anatomy: Anatomy, choice: Choice, batch: Batch, *, state: str) -> list[Pool]:
    """Return what is on the drives: two copies of everything, so that a commit is whole."""
    if not choice.tiers:
        return []
    census = Census.of(anatomy, choice.fragments)
    return [Pool("nvme", "two copies of the state", 2 * _all_bytes(census))]


def _all_bytes(census: Census) -> int:
    """Return the bytes of all blocks' state on a drive, counted once."""
    if ("all",) not in census.placed:
        nbytes = sum(_image_bytes(block, with_weights=True) for block in census.blocks)
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
    """Return the bytes of the buffers before the drives: `store.placement` allocates by the same rule."""
    blocks = [census.blocks[number] for number in census.by_size]
    weights_in_ram = choice.weights_in_ram if choice.tier("working") == "nvme" else len(blocks)
    with_weights = [_image_bytes(block, with_weights=True) for block in blocks[weights_in_ram:]]
    state = [_image_bytes(block) for block in blocks[choice.blocks_in_ram : weights_in_ram]]
    pages = [_padded(block.size.fetch_bytes) for block in blocks]
    pieces = [min(PIECE_BYTES, size) for block in blocks for size in (_image_bytes(block),)]
    largest = max([0, *with_weights, *state[:1], *pieces, *(min(PIECE_BYTES, page) for page in pages)])
    return {
        "staging of state": NUM_STAGING * largest,
        "staging of weights": NUM_STAGING * max(pages[weights_in_ram:], default=0),
    }


def _image_bytes(block: Block, *, with_weights: bool = False) -> int:
    """Return the bytes of a block's state on a drive: whole pages."""
    weights = _padded(block.size.fetch_bytes) if with_weights else 0
    return _padded(2 * block.num_split + 8 * block.num_state) + weights


def _padded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
