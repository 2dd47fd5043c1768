"""Buffers are as large as the largest block that passes them, and no larger."""

from __future__ import annotations

from megatrain.config.optimizers import adamw
from megatrain.layout import pools
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.decoding import decoding_scratch
from megatrain.layout.host_buffers import NUM_PAGES, NUM_STATE_STAGING, PIECE_BYTES
from megatrain.layout.totals import BlockTotals, Residency

MIB = 1 << 20


def block(state: int, working: int) -> BlockBytes:
    """Return a block of fp32 masters with these bytes of moments and of weights on drives."""
    return BlockBytes(working_bytes=working, num_state=state // 8)


def test_an_image_is_whole_pages() -> None:
    sizes = BlockBytes(working_bytes=4097, num_split=64, num_state=128)
    assert (pools.state_image(sizes, adamw.FP32), pools.weights_image(sizes)) == (4096, 8192)


def test_buffers_are_as_large_as_what_passes_them() -> None:
    sizes = [(400, 80), (300, 70), (200, 90)]
    blocks = BlockTotals(block(state * MIB, working * MIB) for state, working in sizes)
    none, one, two, everything = range(4)
    assert pools.weights_buffer(blocks, none) == 90 * MIB
    assert pools.weights_buffer(blocks, everything) == 0
    assert pools.state_buffer(blocks, none, none, adamw.FP32) == 480 * MIB
    assert pools.state_buffer(blocks, one, none, adamw.FP32) == 400 * MIB
    assert pools.state_buffer(blocks, two, two, adamw.FP32) == 290 * MIB
    assert pools.state_buffer(blocks, everything, one, adamw.FP32) == 300 * MIB
    assert pools.drive_buffers(blocks, two, two, adamw.FP32) == {
        "staging of state": NUM_STATE_STAGING * 290 * MIB,
        "staging of weights": NUM_PAGES * 90 * MIB,
    }


def test_a_commit_of_what_is_in_ram_needs_room_for_a_piece() -> None:
    large = BlockTotals([block(400 * MIB, 80 * MIB)])
    assert pools.state_buffer(large, 1, 1, adamw.FP32) == PIECE_BYTES
    small = BlockTotals([block(8 * MIB, 4 * MIB)])
    assert pools.state_buffer(small, 1, 1, adamw.FP32) == 8 * MIB


def test_state_passes_that_is_larger_than_that_of_a_block_with_more_elements() -> None:
    """A remainder can outweigh elements, and these are what blocks are ordered by."""
    blocks = BlockTotals([BlockBytes(num_state=40 * MIB), BlockBytes(num_state=39 * MIB, num_split=39 * MIB)])
    assert pools.state_buffer(blocks, 2, 0, adamw.FP32) == 390 * MIB


def test_device_pools_are_those_of_a_table() -> None:
    """Two streamed blocks, one resident, and one that only has its weights there; one is kept in codes."""
    sizes = [
        BlockBytes(working_bytes=2 * n, num_split=n, num_state=n, num_scales=1) for n in (64, 128, 256, 512)
    ]
    sizes[1] += BlockBytes(working_bytes=512, decoded_bytes=512, codes_bytes=300)
    blocks = Residency.of(sizes, [True, True, True, False], {2})

    def found(is_wide: bool) -> dict[str, int]:
        return pools.device_pools(
            blocks,
            num_slots=3,
            num_gradient_buffers=2,
            is_wide=is_wide,
            waiting=blocks.streamed,
            optimizer=adamw.INT8,
        )

    assert found(is_wide=True) == {
        "slots": 3 * (256 + 512),
        "codes": 300 + decoding_scratch(256),
        "resident weights": 512 + 1024,
        "resident gradients": 1024 + 2048,
        "resident optimizer state": 512 + 2 * 256 + 8,
        "gradient buffers": 2 * 512,
        "waiting gradients": 128 + 256,
    }
    assert found(is_wide=False)["gradient buffers"] == 2 * 256
    assert blocks.all.total(pools.working_plane) == 2 * (64 + 128 + 256 + 512) + 300
