"""Sizes that a person would type, of two digits and a unit, and the least of them that is enough."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Size:
    """A number of bytes, and how an option takes it: `60GiB`, `9.5TB`."""

    nbytes: int
    text: str


def _list_sizes(units: Iterable[tuple[str, int]], last_decades: int) -> list[Size]:
    """List 1, 1.1, ..., 9.9, 10, 11, ..., 99, 100, 110, ..., 990 of every unit, and more of the last one."""
    units = list(units)
    sizes = []
    for name, unit in units:
        num_decades = last_decades if name == units[-1][0] else 3
        for decade in range(num_decades):
            for digits in range(10, 100):
                text = f"{digits // 10}.{digits % 10}".removesuffix(".0")
                number = text if decade == 0 else str(digits * 10 ** (decade - 1))
                sizes.append(Size(int(float(number) * unit), f"{number}{name}"))
    return sizes


MEMORY_SIZES = _list_sizes([("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)], last_decades=7)
DRIVE_SIZES = _list_sizes([("KB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12)], last_decades=5)


def least_size(sizes: Sequence[Size], fits: Callable[[int], bool], *, guess: int) -> Size | None:
    """Return the size that is enough while the one before it is not; None: none is.

    Args:
        sizes: The sizes, in ascending order.
        fits: A function that returns whether so many bytes are enough; if some are, more are too.
        guess: The number of bytes near which the search begins, so that few are tried.
    """
    known: dict[int, bool] = {}

    def is_enough(index: int) -> bool:
        if index not in known:
            known[index] = index >= 0 and fits(sizes[index].nbytes)
        return known[index]

    last = len(sizes) - 1
    high, step = min(bisect_left(sizes, Size(guess, "")), last), 1
    while not is_enough(high):
        if high == last:
            return None
        high, step = min(high + step, last), 2 * step
    low, step = high - 1, 1
    while is_enough(low):
        high, low, step = low, max(-1, low - step), 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return sizes[high]
