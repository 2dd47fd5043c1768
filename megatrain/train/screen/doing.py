"""Says on standard error what a command takes its time for, after a while and again every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

AFTER_S = 2.0
"""Seconds in which nothing is said: most of it is done by then."""

EVERY_S = 10.0
"""Seconds after which what still goes on is said again."""


class Doing:
    """Takes what is being done now, and says it if that still goes on after a while; later steps at once."""

    def __init__(
        self,
        name: str,
        say: Callable[[str], None],
        *,
        after_s: float | None = None,
        every_s: float | None = None,
    ) -> None:
        """Begin to count the seconds.

        Args:
            name: What all lines begin with: the command.
            say: Prints a line, on another thread too.
            after_s: Seconds in which nothing is said; None: `AFTER_S`.
            every_s: Seconds after which a line is said again; None: `EVERY_S`.
        """
        self._name = name
        self._say = say
        self._after_s = AFTER_S if after_s is None else after_s
        self._every_s = EVERY_S if every_s is None else every_s
        self._began_s = self._said_s = time.perf_counter()
        self._lock = threading.Lock()
        self._now = self._told = ""
        self._is_late = False
        self._has_ended = threading.Event()

    def __enter__(self) -> Doing:
        """Wait for the time to speak."""
        threading.Thread(target=self._watch, name="progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say no more."""
        self._has_ended.set()
        with self._lock:
            self._now = ""

    def __call__(self, doing: str) -> None:
        """Take what is done now; nothing: there is no more to say."""
        if not doing:
            self._has_ended.set()
        with self._lock:
            self._now = doing
            if self._is_late and doing:
                self._print()

    def at_once(self, doing: str) -> None:
        """Take what is done now, and say it: it is known to take a while."""
        with self._lock:
            self._now = self._told = doing
            self._said_s = time.perf_counter()
            self._say(f"{self._name}: {doing}")

    def _watch(self) -> None:
        wait_s = self._after_s
        while not self._has_ended.wait(wait_s):
            with self._lock:
                silent_s = time.perf_counter() - self._said_s
                is_new = not self._is_late and self._now != self._told
                if self._now and (is_new or silent_s >= self._every_s):
                    self._print()
                    silent_s = 0.0
                self._is_late = True
                wait_s = self._every_s - silent_s if silent_s < self._every_s else self._every_s

    def _print(self) -> None:
        self._said_s = time.perf_counter()
        self._say(f"{self._name}: {self._now} ({self._said_s - self._began_s:.0f} s so far)")
