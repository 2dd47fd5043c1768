"""Buffers before the drives hold the largest block that passes them, and no more."""

from __future__ import annotations

from megatrain.layout.host_buffers import (
    NUM_PAGES,
    NUM_STATE_STAGING,
    PIECE_BYTES,
    DriveBuffers,
    largest_first,
    padded,
    state_bytes,
)

MIB = 1 << 20


def test_larger_blocks_come_first_and_equal_ones_in_their_order() -> None:
    assert largest_first([3, 5, 3, 5]) == [1, 3, 0, 2]


def test_state_is_whole_pages() -> None:
    assert (padded(0), padded(1), padded(4096), padded(4097)) == (0, 4096, 4096, 8192)
    assert state_bytes(64, 128) == 4096


def test_buffers_are_as_large_as_what_passes_them() -> None:
    state, working = [400 * MIB, 300 * MIB, 200 * MIB], [80 * MIB, 70 * MIB, 90 * MIB]
    buffers = DriveBuffers(state, working)
    none, one, two, everything = range(4)
    assert buffers.page_bytes(none) == NUM_PAGES * 90 * MIB
    assert buffers.page_bytes(everything) == 0
    assert buffers.staging_bytes(none, none) == NUM_STATE_STAGING * 480 * MIB
    assert buffers.staging_bytes(one, none) == NUM_STATE_STAGING * 400 * MIB
    assert buffers.staging_bytes(two, two) == NUM_STATE_STAGING * 290 * MIB
    assert buffers.staging_bytes(everything, one) == NUM_STATE_STAGING * 300 * MIB


def test_a_commit_of_what_is_in_ram_needs_room_for_a_piece() -> None:
    large = DriveBuffers([400 * MIB], [80 * MIB])
    assert large.staging_bytes(1, 1) == NUM_STATE_STAGING * PIECE_BYTES
    small = DriveBuffers([8 * MIB], [4 * MIB])
    assert small.staging_bytes(1, 1) == NUM_STATE_STAGING * 8 * MIB
