"""The search for the longest row: exact to a sixteenth, whatever the limit, in few looks."""

from __future__ import annotations

import random

import pytest

from megatrain.train.planning.longest.lengths import MOST, PARTS, SHORTEST, search_lengths


def test_the_longest_is_found_to_a_sixteenth_of_the_power_of_two_below() -> None:
    drawn = random.Random(0)
    for _ in range(500):
        limit = round(2 ** drawn.uniform(8, 24))
        looked_at: list[int] = []
        found = search_lengths(lambda n, limit=limit, seen=looked_at: seen.append(n) or n <= limit)  # type: ignore[misc]
        assert found.longest is not None
        assert found.too_long is not None
        assert found.longest <= limit < found.too_long
        assert (found.too_long - found.longest) * PARTS == 1 << (found.longest.bit_length() - 1)
        assert len(looked_at) == len(set(looked_at)) <= 16


def test_a_model_s_own_limit_is_looked_at_as_it_is() -> None:
    drawn = random.Random(1)
    for _ in range(500):
        limit, most = round(2 ** drawn.uniform(8, 20)), round(2 ** drawn.uniform(8, 20))
        found = search_lengths(lambda n, limit=limit: n <= limit, most=most)  # type: ignore[misc]
        assert found.longest is not None
        if limit >= most:
            assert (found.longest, found.too_long) == (most, None)
            continue
        assert found.too_long is not None
        assert found.longest <= limit < found.too_long <= most
        assert (found.too_long - found.longest) * PARTS <= 1 << (found.longest.bit_length() - 1)


def test_longer_rows_that_take_less_are_looked_at_where_shorter_ones_do_not_fit() -> None:
    """Rows that pass in tiles, on a device that holds whole ones of `limit` tokens."""
    drawn = random.Random(2)
    for _ in range(500):
        limit, in_tiles = round(2 ** drawn.uniform(8, 16.9)), round(2 ** drawn.uniform(8, 22))

        def fits(n: int, limit: int = limit, in_tiles: int = in_tiles) -> bool:
            return n <= (limit if n <= 1 << 17 else in_tiles)

        found = search_lengths(fits, longest_whole=1 << 17)
        if in_tiles < (1 << 17) * 17 // 16:  # the first look above
            assert found == search_lengths(lambda n, limit=limit: n <= limit)  # type: ignore[misc]
            continue
        assert found.longest is not None
        assert found.too_long is not None
        assert 1 << 17 < found.longest <= in_tiles < found.too_long
        assert (found.too_long - found.longest) * PARTS == 1 << (found.longest.bit_length() - 1)


@pytest.mark.parametrize("most", [1, 64, 100, SHORTEST, 1000, MOST])
def test_nothing_fits_or_everything(most: int) -> None:
    assert search_lengths(lambda _: True, most=most).longest == most
    none = search_lengths(lambda _: False, most=most)
    assert none.longest is None
    assert none.too_long is not None
    assert none.too_long <= max(SHORTEST, 1)
