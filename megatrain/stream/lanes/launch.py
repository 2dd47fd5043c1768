"""The launching thread in a timetable: what it computes takes as long as an accelerator would take."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.stream.lanes.emulated import Link


class LaunchClock:
    """When the launching thread is done with what it has computed, by the timetable.

    It computes in earnest, in less time than the timetable gives it, and sleeps for the rest. What it does
    beside that (hooks, collecting gradients) takes no time by the timetable, as it takes none of an
    accelerator's, as long as it is not late by more than `catch_up_s`; so lateness does not add up.
    """

    def __init__(self, chance: random.Random, jitter_s: float, catch_up_s: float) -> None:
        """Start at no time; `chance` draws the delays, of up to `jitter_s` each."""
        self._chance = chance
        self._jitter_s = jitter_s
        self._catch_up_s = catch_up_s
        self._time_s = 0.0
        self._has_worked = False

    def now(self) -> float:
        """Return the thread's time: that of the real clock until it has worked by the timetable."""
        now_s = time.perf_counter()
        return max(self._time_s, now_s - self._catch_up_s) if self._has_worked else now_s

    def wait_until(self, time_s: float) -> None:
        """Take note that the thread has waited for something that is done at `time_s`."""
        self._time_s = max(self._time_s, time_s)

    def work(self, link: Link, work: float) -> tuple[float, float]:
        """Work off `work` on `link`, and sleep until it is done; return when it began and ended."""
        self._has_worked = True
        ready_s = self.now()
        if self._jitter_s:
            ready_s += self._chance.random() * self._jitter_s
        begin_s, seconds = link.reserve(ready_s, work)
        self._time_s = begin_s + seconds
        sleep_until(self._time_s)
        return begin_s, self._time_s


def sleep_until(time_s: float) -> None:
    """Sleep until `time_s` of `time.perf_counter`; not at all if it is past."""
    while (left_s := time_s - time.perf_counter()) > 0:
        time.sleep(left_s)
