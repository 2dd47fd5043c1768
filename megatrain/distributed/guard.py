"""What a process can tell by itself: how long it has run, and whether its own threads still go on.

Whoever asks another machine may wait for its answer for ever, since nothing tells a socket that a network has
died. So what is here asks nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_TICK_S = 0.5
"""How often a guard looks."""


class RunningClock:
    """Seconds for which this process has run: a stop of it, or of its machine, is left out.

    It is looked at all the time; where nobody could, the process was stopped.
    """

    def __init__(self, most_s: float) -> None:
        """Start at zero.

        Args:
            most_s: Between two looks; what is more was a stop.
        """
        self._most_s = most_s
        self._lock = threading.Lock()
        self._seen_s = time.monotonic()
        self._now_s = 0.0

    def now(self) -> float:
        """Return the seconds so far; every thread may call."""
        with self._lock:
            seen_s = time.monotonic()
            self._now_s += min(seen_s - self._seen_s, self._most_s)
            self._seen_s = seen_s
            return self._now_s


class Guard:
    """A thread that sees for how long another one has not come round."""

    def __init__(self, timeout_s: float, look: Callable[[float], object]) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            timeout_s: The time after which silence is too long; more than a quarter of it at once was a stop.
            look: The function that is called all the time with the seconds since `come_round`; it must ask
                nobody.
        """
        self.clock = RunningClock(timeout_s / 4)
        self._look = look
        self._came_s = self.clock.now()
        self._tick_s = min(_TICK_S, timeout_s / 20)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def start(self) -> None:
        """Look from now on."""
        self.come_round()
        self._thread.start()

    def come_round(self) -> None:
        """Let it see that the thread that calls this goes on."""
        self._came_s = self.clock.now()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._tick_s):
            self._look(self.clock.now() - self._came_s)


class Moves:
    """Whether a thread does anything: by the CPU time that it uses.

    One that writes to a slow disk uses some with every page that gets there, and one that hangs in a lock, or
    in a file system that is gone, none. Other threads tell nothing: those of Gloo look around all the time.
    """

    def __init__(self, clock: RunningClock) -> None:
        """Look at the thread that makes this, from another one."""
        self._clock = clock
        self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._used_s = time.clock_gettime(self._cpu_clock)
        self._moved_s = clock.now()

    def used_s(self) -> float:
        """Return the CPU time that it has used."""
        return time.clock_gettime(self._cpu_clock)

    def idle_s(self) -> float:
        """Return for how long it has not moved."""
        used_s, now = self.used_s(), self._clock.now()
        if used_s > self._used_s:
            self._used_s, self._moved_s = used_s, now
        return now - self._moved_s
