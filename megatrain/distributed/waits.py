"""What a rank waits for, by a thread or by a device behind the host's back: how often, and for how long."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megatrain.distributed.guard import RunningClock

WAITS = {
    "gather": "weights that ranks gather",
    "exchange": "an exchange of gradients",
    "near": "an exchange of gradients in its node",
    "rail": "an exchange of gradients with other nodes",
    "norm": "the norm of the gradient",
    "spread": "the spread of new weights",
    "read": "state that ranks read from drives",
    "write": "state that ranks write to drives",
    "caller": "a meeting of all ranks",
    "orders": "the next order of rank 0",
    "sequence": "its part of the rows' tokens",
}
"""What ranks wait for, by lane: there are no others."""

PATIENT = "orders"
"""Its waits take any time: the first rank reads, evaluates and saves meanwhile, and beats."""


class Wait(NamedTuple):
    """One of them."""

    lane: str
    number: int
    """In this lane: the first one has 1."""
    since_s: float


class Waits:
    """The waits of one rank; every thread may call."""

    def __init__(self, clock: RunningClock) -> None:
        """Count none so far.

        Args:
            clock: The clock that tells how long they take.
        """
        self.calls: Counter[str] = Counter()
        """By lane, how many there were."""
        self._clock = clock
        self._spent_s: dict[str, float] = defaultdict(float)
        self._of_threads: dict[int, Wait] = {}
        self._of_devices: deque[tuple[Wait, Callable[[], bool]]] = deque()

    @contextmanager
    def begin(self, lane: str) -> Iterator[None]:
        """Let this thread wait inside."""
        thread = threading.get_ident()
        self.calls[lane] += 1
        self._of_threads[thread] = Wait(lane, self.calls[lane], self._clock.now())
        try:
            yield
        finally:
            self._spent_s[lane] += self._clock.now() - self._of_threads.pop(thread).since_s

    def launched(self, lane: str, is_done: Callable[[], bool]) -> None:
        """Let a device wait in a lane to which a thread has just come, until it says that it is done."""
        self._of_devices.append((Wait(lane, self.calls[lane], self._clock.now()), is_done))

    def late(self, timeout_s: float) -> list[Wait]:
        """Return those that take longer, of threads and of what a device does first."""
        while self._of_devices and self._of_devices[0][1]():
            self._of_devices.popleft()
        waits = [wait for wait in list(self._of_threads.values()) if wait.lane != PATIENT]
        waits += [wait for wait, _ in list(self._of_devices)[:1]]
        return [wait for wait in waits if self._clock.now() - wait.since_s > timeout_s]

    def __contains__(self, wait: Wait) -> bool:
        """Whether one goes on."""
        if wait in list(self._of_threads.values()):
            return True
        return any(wait == other and not is_done() for other, is_done in list(self._of_devices)[:1])

    def lanes(self) -> list[str]:
        """Return those in which threads wait now."""
        return [wait.lane for wait in list(self._of_threads.values())]

    def spent_s(self) -> float:
        """Return how long threads have waited within steps."""
        return round(sum(seconds for lane, seconds in list(self._spent_s.items()) if lane != PATIENT), 3)
