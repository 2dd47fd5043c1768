"""Jumps of the loss, which are found by a rule whose state checkpoints keep.

A loss is a jump if it lies above the median of the last losses by more than 8 robust standard deviations and
by more than a tenth of the median. Later losses are compared with jumps too, so that a loss that stays high
soon counts as normal. There is no verdict before `LEAST` losses are known.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 64
LEAST = 32
DEVIATIONS = 8.0
SHARE = 0.1
_ROBUST = 1.4826
"""The number of standard deviations of a normal distribution in one median absolute deviation."""


class Spikes:
    """Compares each loss with those before it."""

    def __init__(self) -> None:
        """Make a detector that knows no loss yet."""
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def take(self, loss: float) -> float | None:
        """Record a step's loss; for a jump, return the highest loss that would have been none, else None."""
        highest = self._highest()
        if math.isfinite(loss):
            self._losses.append(loss)
        return highest if highest is not None and loss > highest else None

    def _highest(self) -> float | None:
        if len(self._losses) < LEAST:
            return None
        median = statistics.median(self._losses)
        deviation = _ROBUST * statistics.median(abs(loss - median) for loss in self._losses)
        return median + max(DEVIATIONS * deviation, SHARE * abs(median))

    def state(self) -> list[float]:
        """Return the losses that the next one is compared with."""
        return list(self._losses)

    def restore(self, losses: Iterable[float]) -> None:
        """Restore `state`."""
        self._losses = deque(losses, maxlen=WINDOW)
