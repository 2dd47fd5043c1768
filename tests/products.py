"""Products of settings: every value, pair or a sample in `make test`, the full product in `make parity`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def pairwise_rows(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Choose rows until every pair of values of two axes is in one: greedily, always the same ones."""
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(axes, 2)
        for a in range(len(axes[one]))
        for b in range(len(axes[other]))
    }
    rows = []
    while missing:
        row = dict(min(missing, key=str))
        for axis in axes:
            if axis not in row:
                row[axis] = max(
                    range(len(axes[axis])),
                    key=lambda value: (len(missing & _pairs(axes, row, axis, value)), -value),
                )
        for axis in axes:
            missing -= _pairs(axes, row, axis, row[axis])
        rows.append({axis: axes[axis][row[axis]] for axis in axes})
    return rows


def _pairs(axes: Mapping[str, Any], row: Mapping[str, int], axis: str, value: int) -> set[Any]:
    order = list(axes)
    mine = (axis, value)
    return {
        (mine, theirs) if order.index(axis) < order.index(theirs[0]) else (theirs, mine)
        for theirs in row.items()
        if theirs[0] != axis
    }


def every_pair(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with every pair of values of two axes; all other rows of the product are parity."""
    return _with_the_others(axes, [tuple(row.values()) for row in pairwise_rows(axes)])


def every_value(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with every value of each axis in turn; all other rows of the product are parity."""
    longest = max(map(len, axes.values()))
    chosen = [tuple(values[number % len(values)] for values in axes.values()) for number in range(longest)]
    return _with_the_others(axes, chosen)


def sample(rows: Sequence[Mapping[str, int]], one_in: int) -> set[int]:
    """Choose one row in so many, always the same ones, with as many values of each axis as can be.

    Args:
        rows: The place of a row's value on each axis, by the axis.
        one_in: The number of rows of which one is chosen.

    Returns:
        The places of the chosen rows.
    """
    spread = sorted(range(len(rows)), key=lambda place: (place % one_in, place))
    chosen: set[int] = set()
    seen: set[tuple[str, int]] = set()
    while len(chosen) < -(-len(rows) // one_in):
        left = [place for place in spread if place not in chosen]
        best = max(left, key=lambda place: len(rows[place].items() - seen))
        chosen.add(best)
        seen |= rows[best].items()
    return chosen


def _with_the_others(axes: Mapping[str, Sequence[Any]], chosen: list[Any]) -> pytest.MarkDecorator:
    others = [row for row in itertools.product(*axes.values()) if row not in chosen]
    rows = chosen + [pytest.param(*row, marks=pytest.mark.parity) for row in others]
    return pytest.mark.parametrize(tuple(axes), rows)
