"""Bytes of many blocks: one function of a block's sizes, added up over ranges of blocks or at its largest.

Each function is added up once for all blocks, so that a plan can look at thousands of choices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate

from megatrain.layout.block_bytes import BlockBytes


class BlockTotals:
    """The sizes of blocks in some order."""

    def __init__(self, sizes: Iterable[BlockBytes]) -> None:
        """Take them; nothing is added up yet."""
        self.sizes = tuple(sizes)
        self._values: dict[Hashable, list[int]] = {}
        self._until: dict[Hashable, list[int]] = {}
        self._largest: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.sizes)

    def __getitem__(self, part: slice) -> Selection:
        """Return a range of the blocks."""
        start, stop, _ = part.indices(len(self))
        return Selection(self, ((start, stop),))

    def pick(self, blocks: Iterable[int]) -> Selection:
        """Return some blocks by their numbers."""
        return Selection(self, tuple((block, block + 1) for block in blocks))

    def total(self, of: Callable[..., int], args: tuple[Hashable, ...], start: int, stop: int) -> int:
        """Return the sum of `of(sizes, *args)` over `[start, stop)`."""
        until = self._until.get((of, args))
        if until is None:
            until = self._until[of, args] = [0, *accumulate(self._of(of, args))]
        return until[stop] - until[start] if stop > start else 0

    def largest(self, of: Callable[..., int], args: tuple[Hashable, ...], start: int, stop: int) -> int:
        """Return the largest value over `[start, stop)`, or 0."""
        key = of, args, start, stop
        if key not in self._largest:
            self._largest[key] = max(self._of(of, args)[start:stop], default=0)
        return self._largest[key]

    def _of(self, of: Callable[..., int], args: tuple[Hashable, ...]) -> list[int]:
        if (of, args) not in self._values:
            self._values[of, args] = [of(sizes, *args) for sizes in self.sizes]
        return self._values[of, args]


class Selection:
    """Some of the blocks."""

    __slots__ = ("_ranges", "_totals")

    def __init__(self, totals: BlockTotals, ranges: tuple[tuple[int, int], ...]) -> None:
        """Select `[start, stop)` of each range."""
        self._totals = totals
        self._ranges = ranges

    def __or__(self, other: Selection) -> Selection:
        """Return the blocks of both, which have none in common."""
        return Selection(self._totals, self._ranges + other._ranges)

    def total(self, of: Callable[..., int], *args: Hashable) -> int:
        """Return the sum of `of(sizes, *args)` over the blocks."""
        return sum(self._totals.total(of, args, start, stop) for start, stop in self._ranges)

    def largest(self, of: Callable[..., int], *args: Hashable) -> int:
        """Return the largest value of a block; 0 if there is none."""
        return max((self._totals.largest(of, args, start, stop) for start, stop in self._ranges), default=0)
