"""A timetable: when each task of a step begins and ends, from its lane and the buffers that it touches.

Lanes run their tasks in launch order and at the same time as each other. A task begins when its lane is
free, what it reads was written, and what it writes was read; lanes that share a link take turns on it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from megatrain.plan.program import Buffer, Lane

_LINKS = {
    Lane.FETCH: Lane.FETCH,
    Lane.RESTORE: Lane.FETCH,
    Lane.OFFLOAD: Lane.OFFLOAD,
    Lane.SAVE: Lane.OFFLOAD,
    Lane.READ: Lane.READ,
    Lane.PAGE: Lane.READ,
    Lane.RECALL: Lane.READ,
    Lane.WRITE: Lane.WRITE,
    Lane.STOW: Lane.WRITE,
}
"""Lanes that take turns, and on which link."""

_DRIVES = (Lane.READ, Lane.PAGE, Lane.RECALL, Lane.WRITE, Lane.STOW)

_REMEMBERED = 16
"""Reservations of a link that are kept: later tasks never begin before all of them."""


class Task(NamedTuple):
    """One operation of a program with the time that it takes alone."""

    lane: Lane
    seconds: float
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    kind: str
    """What it is: `fetch`, `forward`, `head`, ..., for bounds and charts."""


class Span(NamedTuple):
    """When a task runs, in seconds from the first one."""

    begin_s: float
    end_s: float


class Timetable:
    """Places tasks, in launch order, as early as lanes, links and buffers allow."""

    def __init__(self, *, waits_for_compute: bool = False, drives_share: bool = False) -> None:
        """Start with everything free.

        Args:
            waits_for_compute: The launching thread computes, so what it launches after a visit cannot begin
                before the visit is done (a CPU, and emulated lanes).
            drives_share: Reads and writes of the drives take turns.
        """
        self._link_of = _LINKS | dict.fromkeys(_DRIVES, Lane.WRITE) if drives_share else _LINKS
        self._waits_for_compute = waits_for_compute
        self._lane_free: dict[Lane, float] = dict.fromkeys(Lane, 0.0)
        self._taken: dict[Lane, list[Span]] = {}
        self._written: dict[Buffer, float] = {}
        self._read: dict[Buffer, float] = {}

    def place(self, tasks: Sequence[Task]) -> list[Span]:
        """Place a step's tasks after all that were placed before."""
        free, written, read = self._lane_free, self._written, self._read
        spans = []
        for task in tasks:
            lane, seconds, reads, writes, _ = task
            begin = free[lane]
            if self._waits_for_compute and lane is not Lane.COMPUTE:
                begin = max(begin, free[Lane.COMPUTE])
            for buffer in reads:
                begin = max(begin, written.get(buffer, 0.0))
            for buffer in writes:
                begin = max(begin, written.get(buffer, 0.0), read.get(buffer, 0.0))
            link = self._link_of.get(lane) if seconds else None
            if link is not None:
                begin = self._reserve(link, begin, seconds)
            end = begin + seconds
            free[lane] = end
            for buffer in reads:
                if read.get(buffer, 0.0) < end:
                    read[buffer] = end
            for buffer in writes:
                written[buffer] = end
            spans.append(Span(begin, end))
        return spans

    def _reserve(self, link: Lane, ready_s: float, seconds: float) -> float:
        """Take the first gap of a link that is long enough: who is ready first is served first."""
        taken = self._taken.setdefault(link, [])
        begin = ready_s
        for span in taken:
            if span.begin_s - begin >= seconds:
                break
            begin = max(begin, span.end_s)
        insort(taken, Span(begin, begin + seconds))
        if len(taken) > _REMEMBERED:
            del taken[0]
        return begin


def steady(
    tasks: Sequence[Task], *, waits_for_compute: bool = False, drives_share: bool = False
) -> tuple[list[Span], list[Span]]:
    """Return when the tasks run in one of many equal steps, and in the step before it.

    The buffers' names tie a step to the next one. All that a step leaves for later is done before the next
    one's forward is over, so the second of two steps is like all that follow.

    Args:
        tasks: Of one step.
        waits_for_compute: See `Timetable`.
        drives_share: See `Timetable`.
    """
    timetable = Timetable(waits_for_compute=waits_for_compute, drives_share=drives_share)
    before = timetable.place(tasks)
    return timetable.place(tasks), before
