"""Chunks of experts: whole pages of both matrices, in an order that the backward reverses."""

from __future__ import annotations

import pytest

from megatrain.layout.blocks import part_name, split_part_name
from megatrain.layout.expert_chunks import chunk_ranges, least_chunk, passing_order


@pytest.mark.parametrize(
    ("numels", "least"),
    [((5760 * 2880, 2880 * 2880), 1), ((2 * 768 * 2048, 768 * 2048), 1), ((1024, 512), 4), ((96, 48), 128)],
)
def test_a_chunk_has_whole_pages_of_each_matrix(numels: tuple[int, int], least: int) -> None:
    assert least_chunk(numels) == least
    assert all(least * numel * 2 % 4096 == 0 for numel in numels)


def test_chunks_are_nearly_equal_and_no_more_than_asked_for() -> None:
    assert chunk_ranges(128, 1, 7) == [range(start, min(start + 19, 128)) for start in range(0, 128, 19)]
    assert chunk_ranges(8, 4, 8) == [range(0, 4), range(4, 8)]
    assert chunk_ranges(8, 128, 4) == [range(0, 8)]
    for number in range(1, 130):
        chunks = chunk_ranges(128, 1, number)
        assert len(chunks) <= number
        assert [expert for chunk in chunks for expert in chunk] == list(range(128))


def test_chunks_pass_from_the_last_to_the_first() -> None:
    assert passing_order(2, 5) == [0, 2, 4, 1, 3]
    assert passing_order(2, 6) == [0, 2, 4, 1, 3, 5], "what runs behind the experts is last"


def test_a_part_is_named_by_its_rows() -> None:
    name = part_name("exp_avg/model.layers.0.mlp.experts.down_proj", range(16, 32))
    assert split_part_name(name) == ("exp_avg/model.layers.0.mlp.experts.down_proj", range(16, 32))
    assert split_part_name("exp_avg/lm_head.weight") == ("exp_avg/lm_head.weight", None)
