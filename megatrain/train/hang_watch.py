"""Notices that a step, an evaluation, a save or a row of metrics makes no progress, from another thread.

Only time counts in which the engine, the device or the disk is waited for, and in which this process has run:
a callback that takes long, a process that is stopped, and a machine that sleeps are no hang.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Literal

from megatrain.distributed.guard import RunningClock

LEAST_S = 1800.0
"""The least limit of `auto`."""
TIMES = 20
"""The limit of `auto`, in medians of the last steps."""
LOOK_S = 1.0
"""The seconds between two looks; fewer where the limit is short."""
_NUM_STEPS = 64


@dataclass(frozen=True, eq=False, slots=True)
class _Watched:
    """What a thread is at, as long as that is looked at."""

    what: str
    cpu_clock: int | None
    """The clock of the thread's CPU time, if that counts as progress."""

    def used_s(self) -> float:
        return 0.0 if self.cpu_clock is None else time.clock_gettime(self.cpu_clock)


class HangWatch:
    """Looks at a run after its first step. Use as a context manager, in which its thread looks."""

    def __init__(
        self,
        after: float | Literal["auto"],
        progress: Callable[[], object],
        hung: Callable[[float, str], object],
    ) -> None:
        """Look at nothing yet.

        Args:
            after: The seconds without progress that are a hang; `auto`: by the steps so far.
            progress: The function whose value changes with all progress; it must wait for nobody.
            hung: The function that is called, on another thread, with the seconds of a hang and what hangs.
        """
        self._after, self._progress, self._hung = after, progress, hung
        self._look_s = LOOK_S if after == "auto" else min(LOOK_S, after / 20)
        self.clock = RunningClock(4 * self._look_s)
        self._taken_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._watched: _Watched | None = None
        self._seen: tuple[object, object] | None = None
        self._moved_s = 0.0
        self._has_ended = threading.Event()

    def __enter__(self) -> HangWatch:
        threading.Thread(target=self._watch, name="hang-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()

    @property
    def limit_s(self) -> float | None:
        """The seconds without progress that are a hang by now; None: no step has been taken."""
        if not self._taken_s:
            return None
        return max(LEAST_S, TIMES * median(self._taken_s)) if self._after == "auto" else self._after

    def took(self, seconds: float) -> None:
        """Note that a step is taken."""
        self._taken_s.append(seconds)

    @contextmanager
    def watched(self, what: str = "", *, moves: bool = False) -> Iterator[None]:
        """Look for as long as the context lasts; another one inside takes its place meanwhile.

        Args:
            what: What this thread is at; empty: the step.
            moves: Whether this thread reads and writes itself, so that the CPU time that it uses is progress.
                One that waits for a device may use some all the time.
        """
        outer = self._watched
        clock = time.pthread_getcpuclockid(threading.get_ident()) if moves else None
        self._watched = _Watched(what, clock) if self._taken_s else None
        try:
            yield
        finally:
            self._watched = outer

    def look(self) -> None:
        """Compare what is watched with the last look."""
        now_s, watched = self.clock.now(), self._watched
        if watched is None:
            return
        seen = watched, (self._progress(), watched.used_s())
        if seen != self._seen:
            self._seen, self._moved_s = seen, now_s
            return
        limit_s = self.limit_s
        if limit_s is not None and now_s - self._moved_s >= limit_s and self._watched is watched:
            self._hung(now_s - self._moved_s, watched.what)

    def _watch(self) -> None:
        while not self._has_ended.wait(self._look_s):
            self.look()
