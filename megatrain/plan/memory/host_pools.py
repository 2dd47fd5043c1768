"""The pools of a choice in RAM and on drives: planes of state that are away are in RAM for some blocks."""

from __future__ import annotations

from dataclasses import replace

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.plan import Pool
from megatrain.layout import pools
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.host_buffers import SCRATCH_CHUNK_BYTES
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.memory.device_pools import host_planes
from megatrain.plan.memory.layer_runs import layer_runs

_PEAKS = (
    *("boundaries", "activations", "staging of activations", "state of other nodes"),
    *("state read from the device", "state until it is on the device"),
)
_SHARED = ("working", "remainder", "gradient", "state of other nodes")
"""The pools in RAM that the ranks of a node have together, as they do the optimizer's planes; each rank has
its own of the rest."""


def host_pools(anatomy: Anatomy, choice: Choice, batch: StepBatch, optimizer: Optimizer) -> list[Pool]:
    """Return the pools in RAM."""
    block_sums = BlockSums.of(anatomy, choice)
    sizes = host_planes(anatomy, choice, batch, optimizer=optimizer)
    if choice.tiers:
        sizes |= _placed(block_sums, choice, batch, optimizer)
    elif choice.has_scratch_on_drives:  # a run with drives commits its state there, wherever it lives
        in_ram = replace(choice, blocks_in_ram=block_sums.num_blocks)
        sizes |= _buffers(block_sums, in_ram, batch, optimizer)
    found = [
        Pool("ram", name, nbytes, is_exact=name not in _PEAKS) for name, nbytes in sizes.items() if nbytes
    ]
    own = sum(pool.nbytes for pool in found if pool.name not in (*_SHARED, *optimizer.planes))
    return found + of_other_ranks("other ranks", own, batch)


def of_other_ranks(name: str, nbytes: int, batch: StepBatch) -> list[Pool]:
    """Return the pool of what the other ranks of a node take, each as many bytes as this one."""
    others = (batch.ranks_of_node - 1) * nbytes
    return [Pool("ram", name, others, is_exact=False)] if others else []


def drive_pools(anatomy: Anatomy, choice: Choice, batch: StepBatch, optimizer: Optimizer) -> list[Pool]:
    """Return what is on the drives: two copies of everything, so that a commit is whole."""
    if not choice.uses_drives:
        return []
    block_sums = BlockSums.of(anatomy, choice)
    copies = pools.drive_pools(block_sums.images(batch)[:], optimizer)
    found = [Pool("nvme", name, nbytes) for name, nbytes in copies.items()]
    found += [_scratch(anatomy, choice, batch)] if choice.boundaries == "nvme" else []
    places = block_sums.gradient_places(choice, batch.num_micro_batches)
    is_wide = anatomy.precision == "bf16"  # else a sum waits where its gradient will, if that is there
    waiting = {
        "waiting gradients": places.on_drives.total(_parked_room, SCRATCH_CHUNK_BYTES),
        "sums of rounds": places.sums_on_drives.total(_parked_sum_room, SCRATCH_CHUNK_BYTES),
    }
    if not is_wide and waiting["sums of rounds"]:
        del waiting["waiting gradients"]
    return found + [Pool("nvme", name, room, is_exact=False) for name, room in waiting.items() if room]


def _parked_room(sizes: BlockBytes, chunk_bytes: int) -> int:
    return pools.scratch_room(pools.parked_gradient(sizes), chunk_bytes)


def _parked_sum_room(sizes: BlockBytes, chunk_bytes: int) -> int:
    return pools.scratch_room(pools.parked_sum(sizes), chunk_bytes)


def _scratch(anatomy: Anatomy, choice: Choice, batch: StepBatch) -> Pool:
    """Return the room for saved activations: one copy, in whole chunks."""
    visits = [run.host_bytes for run in layer_runs(anatomy, choice)]
    room = sum(
        pools.scratch_room(pools.saved_buffer(visit), SCRATCH_CHUNK_BYTES) for visit in visits if visit
    )
    together = min(choice.lockstep, batch.num_micro_batches)
    return Pool("nvme", "saved activations", together * room, is_exact=False)


def placed_bytes(anatomy: Anatomy, choice: Choice, batch: StepBatch, optimizer: Optimizer) -> int:
    """Return what of `host_pools` depends on `blocks_in_ram` and `weights_in_ram`."""
    return sum(_placed(BlockSums.of(anatomy, choice), choice, batch, optimizer).values())


def _placed(block_sums: BlockSums, choice: Choice, batch: StepBatch, optimizer: Optimizer) -> dict[str, int]:
    """Return the pools in RAM that what is on drives decides: those of a placement are counted once."""
    ranks = batch.num_ranks, batch.num_nodes
    key = (choice.tier("working"), choice.blocks_in_ram, choice.weights_in_ram, ranks, optimizer)
    if key not in block_sums.placed:
        planes = _in_ram(block_sums, choice, batch, optimizer)
        block_sums.placed[key] = planes | _buffers(block_sums, choice, batch, optimizer)
    return block_sums.placed[key]


def _in_ram(block_sums: BlockSums, choice: Choice, batch: StepBatch, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of the planes that are in RAM though others are on drives: the largest blocks'."""
    blocks, kept = block_sums.totals, block_sums.kept_by_node(batch)
    weights, state = map(block_sums.ordered, (blocks, kept or blocks))
    return pools.state_planes(
        weights[: _weights_in_ram(block_sums, choice)], state[: choice.blocks_in_ram], optimizer
    )


def _buffers(block_sums: BlockSums, choice: Choice, batch: StepBatch, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of the buffers before the drives."""
    num_weights = _weights_in_ram(block_sums, choice)
    images = block_sums.ordered(block_sums.images(batch))
    return pools.drive_buffers(images, num_weights, choice.blocks_in_ram, optimizer)


def _weights_in_ram(block_sums: BlockSums, choice: Choice) -> int:
    return choice.weights_in_ram if choice.tier("working") == "nvme" else block_sums.num_blocks
