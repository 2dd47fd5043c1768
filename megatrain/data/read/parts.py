"""The split into training and held-out examples: the number asked for, spread evenly, equal for equal seeds.

Each stretch of 1/share examples gives one held-out example, drawn by the seed, so rows come one at a time and
need not be counted first. A number of examples is converted to a share of the count.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from fractions import Fraction
from math import ceil


class Part(Enum):
    """The part that an example belongs to."""

    TRAIN = "train"
    EVAL = "eval"


class HoldOut:
    """Decides for each example, by its place in the order, whether it is held out."""

    def __init__(self, share: Fraction, *, seed: int, offset: int = 0) -> None:
        """Hold out a share of the examples.

        Args:
            share: The held-out share, from 0 to below 1.
            seed: The seed that decides which examples are held out.
            offset: The number of examples of other sources that are counted before.
        """
        self._share, self._seed, self._offset = share, seed, offset
        self._run, self._drawn = -1, -1

    def part(self, ordinal: int) -> Part:
        """Return the part of the example of this number, counted from 0."""
        if not self._share:
            return Part.TRAIN
        place = ordinal + self._offset
        run = int(place * self._share)  # examples from ceil(run / share) on
        if run != self._run:
            first, end = ceil(run / self._share), ceil((run + 1) / self._share)
            digest = hashlib.blake2b(f"{self._seed}:{run}".encode(), digest_size=8).digest()
            self._run, self._drawn = run, first + int.from_bytes(digest, "big") % (end - first)
        return Part.EVAL if place == self._drawn else Part.TRAIN
