"""The search for the longest row that fits: powers of two first, then between two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatrain.plan.search.remedies import SHORTEST

PARTS = 16
"""The distance between two powers of two is looked at in so many parts."""

START = 1 << 15
"""The length that is looked at first."""

MOST = 1 << 24
"""The largest number of tokens of a row that is looked at."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a search for the longest row has found, in tokens of a row."""

    longest: int | None
    """The longest one that fits; None: not even the shortest does."""
    too_long: int | None
    """The shortest one that does not fit; None: every length that may be fits."""


def search_lengths(
    fits: Callable[[int], bool], *, most: int = MOST, longest_whole: int | None = None
) -> Lengths:
    """Return the longest row that fits, to a sixteenth of the power of two below it.

    Args:
        fits: A function that returns whether rows of so many tokens fit; if some do, shorter ones do too, but
            for those of `longest_whole` and fewer.
        most: The largest length that may be.
        longest_whole: The tokens up to which rows pass whole; longer ones take less memory, so that some may
            fit where this one does not. None: all rows pass in the same way.
    """
    found = _search(fits, most)
    if longest_whole is None or found.too_long is None or not found.too_long <= longest_whole < most:
        return found
    if not fits(longest_whole + 1):
        return found
    in_tiles = _search(lambda length: fits(max(length, longest_whole + 1)), most)
    return in_tiles if (in_tiles.longest or 0) > longest_whole else found


def _search(fits: Callable[[int], bool], most: int) -> Lengths:
    power = min(START, 1 << (most.bit_length() - 1))
    if fits(power):
        while 2 * power <= most and fits(2 * power):
            power *= 2
    else:
        while not fits(power // 2):
            power //= 2
            if power <= SHORTEST:
                return Lengths(None, power)
        power //= 2
    high = min(2 * power, most)
    if high == power or (high < 2 * power and fits(high)):
        return Lengths(high, None)
    step = max(1, power // PARTS)
    low, first_over = 0, -(-(high - power) // step)
    while first_over - low > 1:
        middle = (low + first_over) // 2
        low, first_over = (middle, first_over) if fits(power + middle * step) else (low, middle)
    return Lengths(power + low * step, min(power + first_over * step, high))
