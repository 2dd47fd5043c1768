"""Shares of a block's state, and what a plan counts as one."""

from __future__ import annotations

import pytest

from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.ownership import CUT_NUMEL, planned_share, shares


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
