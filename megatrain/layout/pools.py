"""The bytes of every pool on device, host and drives: one function for each.

Planning, the check before anything is allocated, and allocation call these functions, so what they say is
equal by construction. Most are of one block, as are the places and the parts of planes that are allocated;
a buffer that blocks share is as large as the largest of them needs. The functions at the end add them up.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.config.optimizers.optimizer import SCALE_NUMEL, Optimizer
from megatrain.config.runs import SumRoom
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.decoding import decoding_scratch
from megatrain.layout.exchange import Exchange
from megatrain.layout.host_buffers import (
    NUM_GRADIENT_STAGING,
    NUM_PAGES,
    NUM_STATE_STAGING,
    OFFLOAD_ALIGNMENT,
    PIECE_BYTES,
    padded,
)
from megatrain.layout.ownership import CUT_NUMEL, largest_share, num_chunks, room_of_share, tree_room
from megatrain.layout.totals import BlockTotals, GradientPlaces, Residency, Selection

UPDATE_CHUNK_NUMEL = 1 << 22
"""Elements of a pass of an update on the device, at most. Where scratch memory is short, a tenth would do:
it then moves about 30 MB, which takes as long as the launch of its kernel."""
SQUARES_CHUNK_NUMEL = 1 << 22
"""Elements of a gradient that are rounded in one go, to bf16, and squared on the device, in fp64."""
ROOM_ALIGN_BYTES = 64
"""At a multiple of so many bytes a tensor begins that is exchanged."""
ONE_SUM = SumRoom(whole=1)

# -- on the device -------------------------------------------------------------------------------------------


def slot(sizes: BlockBytes) -> int:
    """Return the bytes of a slot that holds a block's weights."""
    return sizes.working_bytes


def codes(sizes: BlockBytes) -> int:
    """Return the bytes of the device in which a block's codes become values: codes, and scratch memory."""
    return sizes.codes_bytes + decoding_scratch(sizes.decoded_bytes // 2)


def resident_weights(sizes: BlockBytes) -> int:
    """Return the bytes of a block's weights that stay on the device."""
    return sizes.working_bytes


def _partial_sums(sizes: BlockBytes, room: SumRoom) -> int:
    """Return the bytes of partial sums in fp32 of a block's gradient."""
    nbytes = room.whole * sizes.accumulator_bytes
    if not room.shares:
        return nbytes
    return nbytes + room.shares * room.sequence * 4 * room_of_share(sizes, room.num_ranks).num_state


def resident_gradient(sizes: BlockBytes, room: SumRoom = ONE_SUM) -> int:
    """Return the bytes in which the gradients of a block that stays on the device add up.

    Args:
        sizes: The sizes of the block.
        room: The room for partial sums; see `StepSums.on_device`.
    """
    return _partial_sums(sizes, room)


def resident_state(sizes: BlockBytes, optimizer: Optimizer, num_ranks: int = 1) -> int:
    """Return the bytes of remainder and optimizer state of a block that is updated on the device.

    Args:
        sizes: The sizes of the block.
        optimizer: The optimizer whose state it is.
        num_ranks: The number of ranks, each of which has the state of its share.
    """
    own = room_of_share(sizes, num_ranks)
    return own.remainder_bytes + own.optimizer_bytes(optimizer)


def whole_state(sizes: BlockBytes, optimizer: Optimizer) -> int:
    """Return the bytes of all of a block's state, as it is in RAM."""
    return working_plane(sizes) + remainder_plane(sizes) + sizes.optimizer_bytes(optimizer)


def gradient_buffer(sizes: BlockBytes, is_wide: bool, room: SumRoom = ONE_SUM) -> int:
    """Return the bytes of a gradient buffer for a block.

    Args:
        sizes: The sizes of the block.
        is_wide: Whether gradients add up there in fp32.
        room: The room for partial sums; see `StepSums.on_device`.
    """
    return _partial_sums(sizes, room) if is_wide else sizes.gradient_bytes


def waiting_gradient(sizes: BlockBytes, num_ranks: int = 1) -> int:
    """Return the bytes in which a complete gradient, or one of `num_ranks` shares, waits on the device."""
    return room_of_share(sizes, num_ranks).gradient_bytes


def square_sums(num_blocks: int) -> int:
    """Return the bytes of the sums of squares of all blocks' gradients, in fp64."""
    return 8 * num_blocks


def gradient_scratch(largest_numel: int, *, in_chunks: bool) -> int:
    """Return the bytes in which pieces of complete gradients are rounded and squared, one after the other.

    A piece's elements in fp64, the root of their sum of squares, and the elements in bf16.

    Args:
        largest_numel: The number of state elements of the largest block.
        in_chunks: Whether squares are added up by chunks, for the bits that any number of ranks has: then
            a piece is of whole chunks, and sums of all chunks of a block are there in place of the root.
    """
    return 2 * min(largest_numel, SQUARES_CHUNK_NUMEL) + 8 * sum(wide_numels(largest_numel, in_chunks))


def wide_numels(largest_numel: int, in_chunks: bool) -> tuple[int, int]:
    """Return how many elements in fp64 of that are for a piece, and for sums of squares; see there."""
    piece = min(largest_numel, SQUARES_CHUNK_NUMEL)
    if not in_chunks:
        return piece + 1, 0
    return num_chunks(piece) * CUT_NUMEL, tree_room(num_chunks(largest_numel))


def exchanged_sum(sizes: BlockBytes, exchange: Exchange) -> int:
    """Return the bytes that a rank takes to make a block's sum, as long as it lasts: what it gives and gets.

    bf16 parameters and fp32 ones pass one after the other.
    """
    own = largest_share(sizes, exchange.num_ranks)
    return 4 * exchange.passing_numel(max(own.num_split, own.num_state - own.num_split))


def exchange_room(sizes: Iterable[BlockBytes], exchange: Exchange) -> int:
    """Return the bytes of a device in which several ranks exchange the sums of blocks, one after the other.

    Beside what is given and got there is what a rank updates of the next one's share: less than a scale's
    elements of each.
    """
    more = 3 * ROOM_ALIGN_BYTES + 4 * SCALE_NUMEL * exchange.num_ranks
    return max((exchanged_sum(each, exchange) for each in sizes), default=0) + more


def rounded_share(sizes: BlockBytes, num_ranks: int) -> int:
    """Return the bytes that a rank takes on the device to round its share of a sum and to square it."""
    return 10 * min(largest_share(sizes, num_ranks).num_state, SQUARES_CHUNK_NUMEL)


def update_scratch(numel: int, optimizer: Optimizer) -> int:
    """Return the scratch memory of an update on the device, as long as it lasts.

    Args:
        numel: The number of state elements that are updated in one go.
        optimizer: The optimizer that updates them.
    """
    return optimizer.scratch_bytes * min(numel, UPDATE_CHUNK_NUMEL)


# -- planes on the host --------------------------------------------------------------------------------------


def working_plane(sizes: BlockBytes) -> int:
    """Return the bytes of a block's working weights, of which some may be encoded."""
    return sizes.kept_bytes


def remainder_plane(sizes: BlockBytes) -> int:
    """Return the bytes of a block's remainder."""
    return sizes.remainder_bytes


def optimizer_plane(sizes: BlockBytes, plane: str, optimizer: Optimizer) -> int:
    """Return the bytes of a block in one of the optimizer's planes."""
    return sizes.plane_bytes(optimizer, plane)


def gradient_plane(sizes: BlockBytes) -> int:
    """Return the bytes of a block's complete gradient."""
    return sizes.gradient_bytes


def accumulator_plane(sizes: BlockBytes, room: SumRoom = ONE_SUM) -> int:
    """Return the bytes on the host of a block's partial sums; see `StepSums.between`."""
    return _partial_sums(sizes, room)


def gradient_staging(sizes: BlockBytes) -> int:
    """Return the bytes of a buffer through which a block's gradient passes, from and to drives too."""
    return parked_gradient(sizes)


def staging_buffer(places: GradientPlaces) -> int:
    """Return the bytes of a buffer through which gradients pass, and sums on their way to drives and back."""
    return max(places.staged.largest(gradient_staging), places.sums_on_drives.largest(parked_sum))


# -- state on drives, and the buffers before them ------------------------------------------------------------


def state_image(sizes: BlockBytes, optimizer: Optimizer) -> int:
    """Return the bytes of a block's remainder and optimizer state on a drive: whole pages."""
    return padded(sizes.remainder_bytes + sizes.optimizer_bytes(optimizer))


def weights_image(sizes: BlockBytes) -> int:
    """Return the bytes of a block's working weights on a drive: whole pages."""
    return padded(sizes.working_bytes)


def state_buffer(blocks: BlockTotals, num_weights: int, num_state: int, optimizer: Optimizer) -> int:
    """Return the bytes of a buffer through which state passes between the drives and its update.

    Args:
        blocks: The sizes of all blocks, the largest first, as they are on a node's drives.
        num_weights: The number of blocks, from the largest on, that have their weights in RAM.
        num_state: The number of blocks, from the largest on, that have all of their state in RAM.
        optimizer: The optimizer whose state it is.
    """
    # at a commit, what lives in RAM passes through the buffers too, a piece at a time
    return max(
        blocks[num_weights:].largest(_image, optimizer),
        blocks[num_state:].largest(state_image, optimizer),
        blocks[:].largest(_piece, optimizer),
    )


def weights_buffer(blocks: BlockTotals, num_weights: int) -> int:
    """Return the bytes of a buffer through which weights pass from the drives to the device."""
    return blocks[num_weights:].largest(weights_image)


def _image(sizes: BlockBytes, optimizer: Optimizer) -> int:
    return state_image(sizes, optimizer) + weights_image(sizes)


def _piece(sizes: BlockBytes, optimizer: Optimizer) -> int:
    return min(PIECE_BYTES, max(state_image(sizes, optimizer), weights_image(sizes)))


# -- saved activations ---------------------------------------------------------------------------------------


def saved_visit(sizes: Iterable[int]) -> int:
    """Return the bytes on the host of what leaves the device of one visit, in parts of these sizes."""
    return sum(-(-size // OFFLOAD_ALIGNMENT) * OFFLOAD_ALIGNMENT for size in sizes)


def saved_buffer(visit_bytes: int) -> int:
    """Return the bytes of a buffer through which a visit's saved activations pass to drives and back."""
    return padded(visit_bytes)


def scratch_room(visit_bytes: int, chunk_bytes: int) -> int:
    """Return the bytes on drives of a visit's saved activations: whole chunks."""
    return -(-visit_bytes // chunk_bytes) * chunk_bytes


# -- added up ------------------------------------------------------------------------------------------------


def device_pools(
    blocks: Residency,
    *,
    num_slots: int,
    num_gradient_buffers: int,
    is_wide: bool,
    waiting: Selection,
    optimizer: Optimizer,
    room: SumRoom = ONE_SUM,
    num_ranks: int = 1,
) -> dict[str, int]:
    """Return the bytes of each pool that is allocated on the device.

    Args:
        blocks: The blocks of the model, by what of them stays on the device.
        num_slots: The number of slots for streamed blocks.
        num_gradient_buffers: The number of buffers for the gradients of streamed blocks.
        is_wide: Whether gradients add up in fp32.
        waiting: The blocks whose complete gradients wait on the device for the norm.
        optimizer: The optimizer whose state it is.
        room: The room for partial sums of a gradient; see `StepSums.on_device`.
        num_ranks: The number of ranks among which complete gradients and the optimizer's state are shared
            out.
    """
    streamed, staying = blocks.streamed, blocks.staying
    return {
        "slots": num_slots * streamed.largest(slot),
        "codes": blocks.all.largest(codes),
        "resident weights": staying.total(resident_weights),
        "resident gradients": staying.total(resident_gradient, room),
        "resident optimizer state": blocks.resident.total(resident_state, optimizer, num_ranks),
        "gradient buffers": num_gradient_buffers * streamed.largest(gradient_buffer, is_wide, room),
        "waiting gradients": waiting.total(waiting_gradient, num_ranks),
    }


def state_planes(weights: Selection, state: Selection, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of each plane of weights and of optimizer state in RAM.

    Args:
        weights: The blocks whose working weights are in RAM.
        state: The blocks whose remainder and optimizer state are in RAM.
        optimizer: The optimizer whose state it is.
    """
    return {
        "working": weights.total(working_plane),
        "remainder": state.total(remainder_plane),
        **{name: state.total(optimizer_plane, name, optimizer) for name in optimizer.planes},
    }


def host_planes(
    blocks: Selection,
    places: GradientPlaces,
    optimizer: Optimizer,
    *,
    room: SumRoom,
    kept: BlockTotals | None = None,
    residents: Selection | None = None,
    mirrors: bool = True,
) -> dict[str, int]:
    """Return the bytes of each plane in RAM of a state that is not on drives.

    Args:
        blocks: The blocks of the model, all of them.
        places: The places where complete gradients wait, each with its blocks.
        optimizer: The optimizer whose state it is.
        room: The room for partial sums, as in `gradient_planes`.
        kept: The sizes of what a node keeps of the remainder, optimizer state and gradients of each block;
            None: all.
        residents: The blocks that are updated on the device; None: there are none.
        mirrors: Whether these have their places in RAM too.
    """
    others = blocks if residents is None else blocks.without(set(residents))
    at_home = blocks if mirrors else others
    state = at_home if kept is None else kept.pick(at_home)
    planes = state_planes(at_home, state, optimizer)
    planes |= gradient_planes(others, places.kept_by(kept), room=room)
    if mirrors or not residents:
        return planes
    planes["state read from the device"] = residents.largest(whole_state, optimizer)
    loaded = blocks.total(working_plane) + blocks.total(remainder_plane)
    return planes | {"state until it is on the device": max(0, loaded - sum(planes.values()))}


def gradient_planes(blocks: Selection, places: GradientPlaces, *, room: SumRoom) -> dict[str, int]:
    """Return the bytes of each plane of gradients in RAM, and of the buffers that those elsewhere pass.

    Args:
        blocks: The blocks that are updated on the host: sums of others stay on the device.
        places: The places where complete gradients wait, each with its blocks.
        room: The room for partial sums that are kept between rounds, beside complete gradients.
    """
    return {
        "gradient": places.on_host.total(gradient_plane),
        "staging": NUM_GRADIENT_STAGING * staging_buffer(places),
        "accumulator": blocks.total(accumulator_plane, room),
    }


def drive_buffers(
    blocks: BlockTotals, num_weights: int, num_state: int, optimizer: Optimizer
) -> dict[str, int]:
    """Return the bytes in RAM of the buffers before the drives; the arguments are those of `state_buffer`."""
    return {
        "staging of state": NUM_STATE_STAGING * state_buffer(blocks, num_weights, num_state, optimizer),
        "staging of weights": NUM_PAGES * weights_buffer(blocks, num_weights),
    }


def parked_gradient(sizes: BlockBytes) -> int:
    """Return the bytes on drives of a block's complete gradient that waits there for the norm."""
    return padded(sizes.gradient_bytes)


def parked_sum(sizes: BlockBytes) -> int:
    """Return the bytes on drives of a sum of a block's gradients that waits there for the next round."""
    return padded(sizes.accumulator_bytes)


def drive_pools(blocks: Selection, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes on the drives: two copies of all state, so that a commit is whole."""
    return {"two copies of the state": 2 * blocks.total(_image, optimizer)}
