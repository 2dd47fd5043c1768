"""Clocks for tests: no computer, however slow or stalled, changes what they say."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from megatrain.stream.lanes import Cause, EmulatedLanes, EmulatedMachine, threads
from megatrain.stream.lanes.base import Event


class OwnClocks:
    """A clock for each thread, which only its own sleeping moves: computing takes no time.

    It takes the place of `time.perf_counter` and `time.sleep`. What a timetable says is then exact, and takes
    no time to wait for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._own = threading.local()
        self.late_s = 0.0
        """By how much every sleep is too long."""
        monkeypatch.setattr(time, "perf_counter", self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def now(self) -> float:
        """Return this thread's time."""
        return getattr(self._own, "now_s", 1000.0)

    def sleep(self, seconds: float) -> None:
        """Move this thread's clock, and no other."""
        self.advance_to(self.now() + seconds + self.late_s)

    def advance_to(self, time_s: float) -> None:
        """Move this thread's clock, unless it is later already."""
        self._own.now_s = max(self.now(), time_s)


class TimetableLanes(EmulatedLanes):
    """Emulated lanes whose times are the timetable's alone: a wait ends when what it waits for is done.

    Only where two lanes share a link may its turns depend on the threads.
    """

    def __init__(self, clocks: OwnClocks, **machine: Any) -> None:
        self._clocks = clocks
        super().__init__(EmulatedMachine(**{"jitter_s": 0.0, **machine}))

    def _wait_now(self, event: Event, cause: Cause) -> None:
        start_s = self._clocks.now()
        super()._wait_now(event, cause)
        self._clocks.advance_to(event.done_s)
        self._recorder.waited(cause, start_s)


class WatchedEvents:
    """Says when a thread waits for an event: takes the place of `threading` in a module."""

    Thread, Lock = threading.Thread, threading.Lock

    def __init__(self) -> None:
        self._waiters = threading.Semaphore(0)

    def Event(self) -> threading.Event:
        """Make an event."""
        waiters = self._waiters

        class Watched(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                if not self.is_set():
                    waiters.release()
                return super().wait(timeout)

        return Watched()

    def until_one_waits(self) -> None:
        """Return when another thread has begun to wait for one of the events."""
        self._waiters.acquire()


def watch_events(monkeypatch: pytest.MonkeyPatch) -> tuple[WatchedEvents, list[float]]:
    """Say when a lane waits for another; returns that, and a clock that only the test moves."""
    now_s = [1000.0]
    events = WatchedEvents()
    monkeypatch.setattr(threads, "threading", events)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    return events, now_s
