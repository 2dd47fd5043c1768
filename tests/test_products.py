"""Products of settings: what is sampled of them, and what is left to `make parity`."""

from __future__ import annotations

import itertools

import pytest

from tests.products import sample


@pytest.mark.parametrize(
    ("lengths", "one_in", "count"), [((12,), 4, 3), ((3, 4), 3, 4), ((2, 6), 5, 3), ((1,), 9, 1)]
)
def test_a_sample_has_every_value_of_an_axis_where_it_has_as_many_rows(
    lengths: tuple[int, ...], one_in: int, count: int
) -> None:
    rows = [dict(zip("abc", places, strict=False)) for places in itertools.product(*map(range, lengths))]
    chosen = sample(rows, one_in)
    assert len(chosen) == count
    for axis, length in zip("abc", lengths, strict=False):
        assert len({rows[place][axis] for place in chosen}) == min(length, count)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("left", ["a", "b"])
@pytest.mark.parametrize("right", ["c", "d"])
def test_members_that_are_not_sampled_are_parity(
    left: str, right: str, request: pytest.FixtureRequest
) -> None:
    """Both values of both, in two of four."""
    is_parity = request.node.get_closest_marker("parity") is not None
    assert is_parity == (left + right not in ("ac", "bd"))
