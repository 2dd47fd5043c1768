"""Standard error shows what a command is busy with, after a while and again every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

AFTER_S = 2.0
"""The seconds of silence, in which most operations end."""

EVERY_S = 10.0
"""The seconds after which an operation that still goes on is shown again."""


class Doing:
    """Receives the present operation, and shows it if it lasts; after a first line, others come at once."""

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
            name: The name of the command, with which all lines begin.
            say: The function that prints a line, on another thread too.
            after_s: The seconds of silence; None means `AFTER_S`.
            every_s: The seconds after which a line is repeated; None means `EVERY_S`.
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
        """Start the thread that waits for the time to speak."""
        threading.Thread(target=self._watch, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the output."""
        self._has_ended.set()
        with self._lock:
            self._now = ""

    def __call__(self, doing: str) -> None:
        """Set the present operation; an empty text ends the output."""
        if not doing:
            self._has_ended.set()
        with self._lock:
            self._now = doing
            if self._is_late and doing:
                self._print()

    def at_once(self, doing: str) -> None:
        """Set the present operation and show it, since it is known to take a while."""
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
