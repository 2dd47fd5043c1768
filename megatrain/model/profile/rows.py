"""Micro-batches of several sizes counted at once: what one size shows of each byte says it of the others.

A model runs once, on a prime number of rows that divides nothing else in it. Then a tensor whose size is a
multiple of that prime is made of rows, and grows with them; any other is as large whatever their number. So
each number that is counted becomes one for every wanted size, and sums and peaks are taken size by size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np


class Rows:
    """The number of rows that run, and the number for which a count is wanted."""

    def __init__(self, counted: int, wanted: Sequence[int] | None = None) -> None:
        """Count for the rows that run, or for others too.

        Args:
            counted: Rows that run.
            wanted: Numbers of rows; None: only those that run, and every number stays as it is.
        """
        self.counted = counted
        self._wanted = None if wanted is None else np.array(wanted, dtype=np.int64)
        self._most = max(wanted or [0])

    def of(self, number: int) -> Any:
        """Return a number of bytes, elements or FLOPs of these rows as one for each wanted size.

        They are rounded to floats where one is beyond 64 bits, as FLOPs of attention in long rows may be.
        """
        if self._wanted is None or number % self.counted:
            return number
        each = number // self.counted
        return each * self._wanted if each * self._most < 1 << 63 else float(each) * self._wanted

    def each(self) -> list[Rows]:
        """Return each wanted size by itself, for what is not a sum of such numbers."""
        if self._wanted is None:
            return [self]
        return [Rows(self.counted, [size]) for size in self._wanted]

    def one(self, number: int) -> int:
        """Return a number for the one size that is wanted."""
        return number if self._wanted is None else int(np.ravel(self.of(number))[0])


def most(*numbers: Any) -> Any:
    """Return the largest of numbers, size by size."""
    found, *others = numbers
    for other in others:
        plain = isinstance(found, int) and isinstance(other, int)
        found = max(found, other) if plain else np.maximum(found, other)
    return found


def least(left: Any, right: Any) -> Any:
    """Return the smaller of two numbers, size by size."""
    return np.minimum(left, right) if _is_several(left, right) else min(left, right)


def is_more(left: Any, right: Any) -> bool:
    """Whether a number is larger than another one for any size."""
    return bool(np.any(np.greater(left, right))) if _is_several(left, right) else left > right


def of_size(value: Any, index: int, *, but: Sequence[str] = ()) -> Any:
    """Return what was counted, with all numbers in it for one of the wanted sizes.

    Args:
        value: Dataclasses, lists, tuples and dictionaries of numbers.
        index: The index of the size.
        but: Fields of dataclasses that hold something else.
    """
    if isinstance(value, np.ndarray):
        return value[index].item()
    if type(value) in (list, tuple):
        return type(value)(of_size(inner, index, but=but) for inner in value)
    if type(value) is dict:
        return {key: of_size(inner, index, but=but) for key, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.name not in but]
        return replace(value, **{name: of_size(getattr(value, name), index, but=but) for name in names})
    return value


def prime_beside(numbers: Iterable[int]) -> int:
    """Return a prime number of rows that divides none of the numbers above 1."""
    others = {number for number in numbers if number > 1}
    return next(prime for prime in _PRIMES if all(number % prime for number in others))


_PRIMES = [number for number in range(67, 1000, 2) if all(number % divisor for divisor in range(3, 32, 2))]
"""Rows that may run: few enough that integers of all of their tokens are computed (`metering`)."""


def _is_several(*values: Any) -> bool:
    return any(isinstance(value, np.ndarray) for value in values)
