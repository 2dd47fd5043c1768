"""When a run saves: at steps, after a time, or as often as costs little."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatrain.config.types import seconds_between, steps_between

LEAST_S = 600.0
"""Seconds between checkpoints of `auto`, at least."""
COST_SHARE = 0.02
"""The share of a run's time that checkpoints of `auto` may take."""


def least_interval(cost_s: float) -> float:
    """Return the seconds between checkpoints of `auto`.

    Args:
        cost_s: The seconds by which one makes the run longer.
    """
    return max(LEAST_S, cost_s / COST_SHARE)


class SaveInterval:
    """Says after which steps a run saves."""

    def __init__(
        self,
        every: int | str | None,
        steps_per_epoch: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            every: The setting `checkpoint.every`.
            steps_per_epoch: The number of steps of one pass over the data.
            clock: The clock in seconds, for tests.
        """
        self._clock = clock
        self.is_auto = every == "auto"
        self._seconds = LEAST_S if self.is_auto else seconds_between(every)
        self._steps = None if self._seconds is not None else steps_between(every, steps_per_epoch)
        self._since = clock()

    @property
    def is_timed(self) -> bool:
        """Whether it is a time, which passes otherwise on every rank."""
        return self._seconds is not None

    def is_due(self, step: int) -> bool:
        """Return whether the state after a step is to be saved; ranks ask the first one's."""
        if self._seconds is not None:
            return self._clock() - self._since >= self._seconds
        return self._steps is not None and step % self._steps == 0

    def begun(self) -> None:
        """Take note that a checkpoint is begun."""
        self._since = self._clock()

    def took(self, cost_s: float) -> None:
        """Take note by how many seconds it has made the run longer."""
        if self.is_auto:
            self._seconds = least_interval(cost_s)
