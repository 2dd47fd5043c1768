"""Buffers are handed out in whole pages, to the largest blocks first."""

from __future__ import annotations

from megatrain.layout.host_buffers import largest_first, padded


def test_larger_blocks_come_first_and_equal_ones_in_their_order() -> None:
    assert largest_first([3, 5, 3, 5]) == [1, 3, 0, 2]


def test_pages_are_whole() -> None:
    assert (padded(0), padded(1), padded(4096), padded(4097)) == (0, 4096, 4096, 8192)
