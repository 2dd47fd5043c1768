"""What keeps lanes to the rates of another machine: links, timetables, and the launching thread's clock."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from megatrain.plan.program.kinds import Lane
from megatrain.stream.lanes.base import Event
from megatrain.stream.lanes.records import Cause, Recorder
from megatrain.stream.lanes.threads import Failure, Worker


class Link:
    """Something that serves one operation at a time, at a rate."""

    def __init__(self, rate: float) -> None:
        """Serve `rate` units of work per second; 0: no delay."""
        self._rate = rate
        self._lock = threading.Lock()
        self._free_s = 0.0

    def set_rate(self, rate: float) -> None:
        """Serve at another rate from the next operation on."""
        with self._lock:
            self._rate = rate

    def reserve(self, ready_s: float, work: float) -> tuple[float, float]:
        """Return when an operation that is ready at `ready_s` begins, and the seconds that it takes."""
        with self._lock:
            seconds = work / self._rate if self._rate else 0.0
            if not seconds:
                return ready_s, 0.0
            begin_s = max(ready_s, self._free_s)
            self._free_s = begin_s + seconds
        return begin_s, seconds


class PacedWorker(Worker):
    """A lane that keeps to a timetable.

    An operation begins when what it waits for is done by the timetable and its lane and link are free by the
    timetable, so that a thread that sleeps too long does not delay what comes after: errors do not add up.
    """

    def __init__(
        self,
        lane: Lane,
        failure: Failure,
        recorder: Recorder,
        link: Link,
        chance: random.Random,
        jitter_s: float,
        catch_up_s: float,
    ) -> None:
        """Take turns on `link`; `chance` draws the delays, of up to `jitter_s` each."""
        super().__init__(lane, failure, recorder)
        self._link = link
        self._chance = chance
        self._jitter_s = jitter_s
        self._catch_up_s = catch_up_s
        self._ready_s = 0.0
        self._free_s = 0.0

    def _wait(self, event: Event, cause: Cause) -> None:
        self._until_launched(event, cause)
        self._ready_s = max(self._ready_s, event.done_s)

    def _run(self, function: Callable[[], object], work: float, label: object, enqueued_s: float) -> None:
        timely_s = time.perf_counter() - self._catch_up_s
        ready_s = max(enqueued_s, self._ready_s, self._free_s, timely_s)
        if self._jitter_s:
            ready_s += self._chance.random() * self._jitter_s
        begin_s, seconds = self._link.reserve(ready_s, work)
        sleep_until(begin_s)
        start_s = time.perf_counter()
        try:
            function()
        finally:
            self._free_s = begin_s + max(seconds, time.perf_counter() - start_s)
            sleep_until(self._free_s)
        self._recorder.span(self.lane, label, begin_s, self._free_s, work)

    def _set(self, event: Event) -> None:
        event.done_s = max(self._free_s, self._ready_s)
        super()._set(event)


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
