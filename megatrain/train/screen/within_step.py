"""How far a long step is, while it goes on: for the screen, and for whoever asks a run to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatrain.stream.execute.passed import Passed
from megatrain.train.records.metrics import format_duration

AFTER_S = 10.0
"""The seconds of a step after which it is shown how far it is; most steps end before."""
LOOK_S = 1.0
"""The seconds between two looks."""
_LEAST_SHARE = 0.02
"""The share of a step from which on its time left is foretold."""


class WithinStep:
    """Looks at the step that is going on. Use as a context manager, inside of which another thread looks."""

    def __init__(
        self,
        passed: Callable[[], Passed | None],
        show: Callable[[str], object],
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look at nothing yet.

        Args:
            passed: The function that says how far the step is, on any thread, as `Engine.passed`.
            show: The function that is given a line on a step that lasts, on another thread.
            every_s: The seconds between two lines on one step.
            clock: The clock in seconds, for tests.
        """
        self._passed, self._show = passed, show
        self._every_s, self._clock = every_s, clock
        self._step: int | None = None
        self._began_s = self._shown_s = 0.0
        self._has_passed = False
        """A layer of the step has been seen to be passed."""
        self._lock = threading.Lock()
        self._has_ended = threading.Event()

    def __enter__(self) -> WithinStep:
        threading.Thread(target=self._watch, name="within-step", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._end()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Look at a step for as long as the context lasts; its number counts from 1."""
        with self._lock:
            self._began_s = self._clock()
            self._shown_s = self._began_s + AFTER_S - self._every_s
            self._step, self._has_passed = number, False
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:  # no line comes after this
            self._step = None

    def look(self) -> None:
        """Show how far the step is, if it has lasted long enough and nothing was shown lately."""
        with self._lock:
            now_s = self._clock()
            if self._step is None or now_s - self._began_s < AFTER_S or now_s - self._shown_s < self._every_s:
                return
            self._shown_s = now_s
            self._show(f"step {self._step}: {self._describe()}")

    def describe(self) -> str:
        """Return which step is going on, and how far it is, in a few words; empty if none is."""
        with self._lock:
            if self._step is None:
                return ""
            return f"step {self._step} ({self._describe()})"

    def _describe(self) -> str:
        passed = self._passed()
        lasted_s = (
            self._clock() - self._began_s
        )  # looked at last, so what began in this step has not lasted longer
        parts = [f"{format_duration(lasted_s)} so far"]
        if passed is None or passed.num_foreseen == 0 or passed.seconds > lasted_s:
            return parts[0]  # the forward of this step has not begun
        if passed.num_visits == 0 and self._has_passed:
            return parts[0]  # the engine waits for the next step, or begins this one anew
        self._has_passed = passed.num_visits > 0
        visits = f"{passed.num_visits:,} of {passed.num_foreseen:,} passes of layers"
        parts = [f"{passed.share:.0%}", visits, *parts]
        if passed.num_visits == passed.num_foreseen:
            parts.append("updating the weights")
        elif passed.share >= _LEAST_SHARE:
            left_s = lasted_s * (1 - passed.share) / passed.share
            parts.append(f"about {format_duration(left_s)} left in it")
        return ", ".join(parts)

    def _watch(self) -> None:
        while not self._has_ended.wait(LOOK_S):
            self.look()
