"""What the lanes did and what they waited for, as measured. Times are seconds of `time.perf_counter`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

from megatrain.plan.program.kinds import Lane

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


_Span: TypeAlias = tuple[Lane, object, float, float, float]
_Wait: TypeAlias = tuple[Cause, float, float]


class Record:
    """What ended between two calls of `take_record`. It is put in order when somebody looks at it."""

    def __init__(self, spans: Sequence[_Span], waits: Sequence[_Wait]) -> None:
        """Keep what was noted, as it was noted."""
        self._spans = spans
        self._waits = waits

    def of(self, lanes: Collection[Lane]) -> Record:
        """Return what these lanes did, and waited for."""
        spans = [span for span in self._spans if span[0] in lanes]
        return Record(spans, [wait for wait in self._waits if wait[0].waiting in lanes])

    @cached_property
    def spans(self) -> list[Span]:
        """The operations, by time of their start."""
        found = [Span(lane, str(what), *rest) for lane, what, *rest in self._spans]
        return sorted(found, key=lambda span: span.start_s)

    @cached_property
    def waits(self) -> list[Wait]:
        """The waits, likewise."""
        return sorted((Wait(*wait) for wait in self._waits), key=lambda wait: wait.start_s)


class Recorder:
    """Collects from all lanes; every method may be called from every thread.

    The lists hold plain tuples, because appending to a deque is atomic and a tuple costs a tenth of a record.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._spans: deque[_Span] = deque(maxlen=MAX_KEPT)
        self.note: Callable[[_Span], None] = self._spans.append
        """Notes an operation that has ended, as `span` does, in C."""
        self._waits: deque[_Wait] = deque(maxlen=MAX_KEPT)

    def span(self, lane: Lane, label: object, start_s: float, end_s: float, work: float = 0.0) -> None:
        """Note an operation that has ended."""
        self.note((lane, label, start_s, end_s, work))

    def waited(self, cause: Cause, start_s: float) -> None:
        """Note a wait that began at `start_s` and ends now, if it blocked at all."""
        seconds = time.perf_counter() - start_s
        if seconds > SHORTEST_WAIT_S:
            self._waits.append((cause, start_s, seconds))

    def newest_s(self) -> float:
        """Return when the operation ended that was noted last; 0 if none is kept."""
        try:
            return self._spans[-1][3]
        except IndexError:
            return 0.0

    def num_visits(self, since_s: float) -> int:
        """Count the visits that are noted, and ended after a moment of `time.perf_counter`."""
        noted = self._spans.copy()  # in C, while others append
        return sum(
            lane is Lane.COMPUTE and end_s >= since_s and getattr(label, "is_visit", False)
            for lane, label, _, end_s, _ in noted
        )

    def take(self) -> Record:
        """Return everything noted since the last call, and forget it."""
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        return Record(spans, [self._waits.popleft() for _ in range(len(self._waits))])
