"""Which examples are held out for evaluation: as many as asked, spread evenly, the same for the same seed.

Each run of 1/share examples gives one of them, drawn by the seed, so rows need not be counted before and come
one at a time. A number of examples is a share of the count.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from fractions import Fraction
from math import ceil


class Part(Enum):
    """What an example is for."""

    TRAIN = "train"
    EVAL = "eval"


class HoldOut:
    """Tells of each example, by its place in the order, whether it is held out."""

    def __init__(self, share: Fraction, *, seed: int, offset: int = 0) -> None:
        """Hold out a share of the examples.

        Args:
            share: From 0 to below 1.
            seed: Decides which.
            offset: Examples of other sources that are counted before.
        """
        self._share, self._seed, self._offset = share, seed, offset
        self._run, self._drawn = -1, -1

    def part(self, ordinal: int) -> Part:
        """Return what the example of this number, from 0, is for."""
        if not self._share:
            return Part.TRAIN
        place = ordinal + self._offset
        run = int(place * self._share)  # examples from ceil(run / share) on
        if run != self._run:
            first, end = ceil(run / self._share), ceil((run + 1) / self._share)
            digest = hashlib.blake2b(f"{self._seed}:{run}".encode(), digest_size=8).digest()
            self._run, self._drawn = run, first + int.from_bytes(digest, "big") % (end - first)
        return Part.EVAL if place == self._drawn else Part.TRAIN
