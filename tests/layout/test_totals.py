"""Sums over ranges of blocks are those of the blocks themselves."""

from __future__ import annotations

from megatrain.config.optimizers import adamw
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.totals import BlockTotals

SIZES = [
    BlockBytes(working_bytes=n, num_split=n // 2, num_state=n, num_scales=n % 7) for n in (5, 9, 4, 1, 8)
]
TOTALS = BlockTotals(SIZES)


def count(sizes: BlockBytes, factor: int = 1) -> int:
    return factor * sizes.working_bytes


def test_every_range_adds_up_and_has_a_largest() -> None:
    for start in range(-1, 7):
        for stop in range(7):
            part = [size.working_bytes for size in SIZES[start:stop]]
            assert TOTALS[start:stop].total(count) == sum(part)
            assert TOTALS[start:stop].total(count, 3) == 3 * sum(part)
            assert TOTALS[start:stop].largest(count) == max(part, default=0)


def test_parts_join_and_blocks_are_picked() -> None:
    both = TOTALS[:2] | TOTALS[4:]
    assert (both.total(count), both.largest(count)) == (22, 9)
    picked = TOTALS.pick([1, 3])
    assert (picked.total(count), picked.largest(count, 2)) == (10, 18)
    assert (TOTALS.pick([]).total(count), TOTALS.pick([]).largest(count)) == (0, 0)


def test_methods_of_the_sizes_add_up_too() -> None:
    for moments in adamw.FORMATS:
        expected = sum(size.update_bytes(moments) for size in SIZES[1:3])
        assert TOTALS[1:3].total(BlockBytes.update_bytes, moments) == expected
