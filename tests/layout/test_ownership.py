"""Shares of a block's state: of ranks, of the nodes that they are on, and what a plan counts as one."""

from __future__ import annotations

import pytest

from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.ownership import CUT_NUMEL, node_shares, node_totals, planned_share, shares

SPLIT, FULL = 37 * CUT_NUMEL + 640, 3 * CUT_NUMEL
SIZES = BlockBytes(working_bytes=2 * SPLIT + 4 * FULL, num_split=SPLIT, num_state=SPLIT + FULL)


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(2, 1), (2, 2), (4, 2), (8, 2), (8, 4), (8, 8)])
@pytest.mark.parametrize("block", [0, 1, 6])
def test_nodes_keep_the_state_among_them_and_each_what_its_ranks_do(
    num_ranks: int, num_nodes: int, block: int
) -> None:
    own, nodes = (
        shares(SIZES, block, num_ranks),
        node_shares(shares(SIZES, block, num_ranks), num_nodes),
    )
    size = num_ranks // num_nodes
    for node, kept in enumerate(nodes):
        ranks = own[node * size : (node + 1) * size]
        assert [*kept.split] == [n for rank in ranks for n in rank.split]
        assert [*kept.full] == [n for rank in ranks for n in rank.full]
    assert sum(kept.numel for kept in nodes) == SIZES.num_state


def test_what_a_node_keeps_is_its_part_of_all_but_working_weights() -> None:
    assert node_totals([SIZES] * 3, 4, 1) is None
    found = [node_totals([SIZES] * 3, 4, 2, node) for node in range(2)]
    remainders = [kept.sizes[0].remainder_bytes for kept in found if kept is not None]
    assert sum(remainders) == SIZES.remainder_bytes
    assert abs(remainders[0] - remainders[1]) <= 4 * CUT_NUMEL


@pytest.mark.parametrize("numel", [1_000_000, 5 * CUT_NUMEL, CUT_NUMEL - 64])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_planned_share_is_the_largest_or_the_mean_of_what_stays_whole(numel: int, num_ranks: int) -> None:
    sizes = BlockBytes(working_bytes=2 * numel, num_split=numel, num_state=numel)
    counts = [share.numel for share in shares(sizes, 0, num_ranks)]
    planned = planned_share(sizes, num_ranks).numel
    if 0 in counts:
        assert planned == -(-numel // num_ranks)
    else:  # the last chunk of all may be shorter
        assert max(counts) <= planned < max(counts) + CUT_NUMEL
