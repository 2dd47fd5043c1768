"""What the lanes did and what they waited for, as measured. Times are seconds of `time.perf_counter`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from megatrain.plan.program.operations import Lane

MAX_KEPT = 200_000
"""Spans, and waits, that are kept when nobody takes them; older ones are dropped."""
SHORTEST_WAIT_S = 1e-5
"""Shorter waits did not block: this is what it takes to find that out."""


class Cause(NamedTuple):
    """Why a lane waits: for what another lane does with a buffer of this kind."""

    waiting: Lane
    owner: Lane
    buffer: str


class Span(NamedTuple):
    """One operation in its lane."""

    lane: Lane
    label: str
    start_s: float
    end_s: float
    work: float = 0.0
    """As given to `enqueue` or `end`: bytes, or FLOPs."""


class Wait(NamedTuple):
    """A time in which a lane stood still."""

    cause: Cause
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Record:
    """What ended between two calls of `take_record`, each list by time of its start."""

    spans: list[Span]
    waits: list[Wait]


class Recorder:
    """Collects from all lanes; every method may be called from every thread.

    The lists hold plain tuples, because appending to a deque is atomic and a tuple costs a tenth of a record.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._spans: deque[tuple[Lane, str, float, float, float]] = deque(maxlen=MAX_KEPT)
        self._waits: deque[tuple[Cause, float, float]] = deque(maxlen=MAX_KEPT)

    def span(self, lane: Lane, label: str, start_s: float, end_s: float, work: float = 0.0) -> None:
        """Note an operation that has ended."""
        self._spans.append((lane, label, start_s, end_s, work))

    def waited(self, cause: Cause, start_s: float) -> None:
        """Note a wait that began at `start_s` and ends now, if it blocked at all."""
        seconds = time.perf_counter() - start_s
        if seconds > SHORTEST_WAIT_S:
            self._waits.append((cause, start_s, seconds))

    def take(self) -> Record:
        """Return everything noted since the last call, and forget it."""
        spans = [Span(*self._spans.popleft()) for _ in range(len(self._spans))]
        waits = [Wait(*self._waits.popleft()) for _ in range(len(self._waits))]
        spans.sort(key=lambda span: span.start_s)
        waits.sort(key=lambda wait: wait.start_s)
        return Record(spans, waits)
