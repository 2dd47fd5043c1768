"""Says on standard error what a command takes its time for, once it has taken some."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

AFTER_S = 2.0
"""Seconds in which nothing is said: most of it is done by then."""


class Doing:
    """Takes what is being done now, and says it if that still goes on after a while; later steps at once."""

    def __init__(self, name: str, say: Callable[[str], None], *, after_s: float | None = None) -> None:
        """Begin to count the seconds.

        Args:
            name: What all lines begin with: the command.
            say: Prints a line, on another thread too.
            after_s: Seconds in which nothing is said; None: `AFTER_S`.
        """
        self._name = name
        self._say = say
        self._began_s = time.perf_counter()
        self._lock = threading.Lock()
        self._now = self._told = ""
        self._is_late = False
        self._timer = threading.Timer(AFTER_S if after_s is None else after_s, self._speak_up)
        self._timer.daemon = True

    def __enter__(self) -> Doing:
        """Wait for the time to speak."""
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say no more."""
        self._timer.cancel()
        with self._lock:
            self._now = ""

    def __call__(self, doing: str) -> None:
        """Take what is done now; nothing: there is no more to say."""
        if not doing:
            self._timer.cancel()
        with self._lock:
            self._now = doing
            if self._is_late and doing:
                self._print()

    def at_once(self, doing: str) -> None:
        """Take what is done now, and say it: it is known to take a while."""
        with self._lock:
            self._now = self._told = doing
            self._say(f"{self._name}: {doing}")

    def _speak_up(self) -> None:
        with self._lock:
            self._is_late = True
            if self._now != self._told:
                self._print()

    def _print(self) -> None:
        self._say(f"{self._name}: {self._now} ({time.perf_counter() - self._began_s:.0f} s so far)")
