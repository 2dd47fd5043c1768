"""A timetable: when each task of a step begins and ends, from its lane and the buffers that it touches.

Lanes run their tasks in launch order and at the same time as each other. A task begins when its lane is
free, what it reads was written, and what it writes was read; lanes that share a link take turns on it.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Task

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
    Lane.GATHER: Lane.EXCHANGE,
    Lane.EXCHANGE: Lane.EXCHANGE,
}
"""Lanes that take turns, and on which link."""

_THROUGH_HOST = {Lane.EXCHANGE: Lane.OFFLOAD, Lane.GATHER: Lane.FETCH}
"""The links to the host that exchanges and gathers take where devices have no access to each other."""

_DRIVES = (Lane.READ, Lane.PAGE, Lane.RECALL, Lane.WRITE, Lane.STOW)

_REMEMBERED = 16
"""Reservations of a link that are kept: later tasks never begin before all of them."""


_NUMBERS = {lane: number for number, lane in enumerate(Lane)}

_Numbered: TypeAlias = tuple[int, float, list[int], list[int]]
"""A task's lane, seconds, and the buffers that it reads and writes, as numbers."""


def links(*, drives_share: bool = False, passes_host: bool = False) -> Mapping[Lane, Lane]:
    """Return on which link each lane takes turns, if it does.

    Args:
        drives_share: Whether reads and writes of the drives take turns.
        passes_host: Whether what devices exchange passes through host memory.
    """
    found = _LINKS | (_THROUGH_HOST if passes_host else {})
    return found | dict.fromkeys(_DRIVES, Lane.WRITE) if drives_share else found


class TaskSpan(NamedTuple):
    """The time in which a task runs, in seconds from the first one."""

    begin_s: float
    end_s: float


class Timetable:
    """Places tasks, in launch order, as early as lanes, links and buffers allow."""

    def __init__(self, *, waits_for_compute: bool = False, link_of: Mapping[Lane, Lane] = _LINKS) -> None:
        """Start with everything free.

        Args:
            waits_for_compute: Whether the launching thread computes, so that what it launches after a visit
                cannot begin before the visit is done (a CPU, and emulated lanes).
            link_of: The link on which each lane takes turns, as `links` returns it.
        """
        self._links = [_NUMBERS[link_of[lane]] if lane in link_of else -1 for lane in Lane]
        self._waits_for_compute = waits_for_compute
        self._lane_free = [0.0] * len(_NUMBERS)
        self._taken: list[list[tuple[float, float]]] = [[] for _ in _NUMBERS]
        self._buffers: dict[Buffer, int] = {}
        self._written: list[float] = []
        self._read: list[float] = []

    def place(self, tasks: Sequence[Task]) -> list[TaskSpan]:
        """Place a step's tasks after all that were placed before."""
        begins, ends = self.run(self.numbered(tasks))
        return [TaskSpan(*span) for span in zip(begins, ends, strict=True)]

    def numbered(self, tasks: Sequence[Task]) -> list[_Numbered]:
        """Return tasks as `run` wants them: a step's are numbered once, however often it runs."""
        buffers, lanes = self._buffers, _NUMBERS
        numbered = []
        for lane, seconds, reads, writes, _ in tasks:
            numbered.append(
                (
                    lanes[lane],
                    seconds,
                    [buffers.setdefault(buffer, len(buffers)) for buffer in reads],
                    [buffers.setdefault(buffer, len(buffers)) for buffer in writes],
                )
            )
        more = len(buffers) - len(self._written)
        self._written += [0.0] * more
        self._read += [0.0] * more
        return numbered

    def run(self, tasks: Sequence[_Numbered]) -> tuple[list[float], list[float]]:
        """Place tasks after all before, and return when they begin and end; this loop is a plan's time."""
        free, written, read, links = self._lane_free, self._written, self._read, self._links
        compute = _NUMBERS[Lane.COMPUTE] if self._waits_for_compute else -1
        begins, ends = [], []
        for lane, seconds, reads, writes in tasks:
            begin = free[lane]
            if compute >= 0 and free[compute] > begin:
                begin = free[compute]
            for buffer in reads:
                if written[buffer] > begin:
                    begin = written[buffer]
            for buffer in writes:
                if written[buffer] > begin:
                    begin = written[buffer]
                if read[buffer] > begin:
                    begin = read[buffer]
            if seconds and links[lane] >= 0:
                begin = self._reserve(links[lane], begin, seconds)
            end = begin + seconds
            free[lane] = end
            for buffer in reads:
                if read[buffer] < end:
                    read[buffer] = end
            for buffer in writes:
                written[buffer] = end
            begins.append(begin)
            ends.append(end)
        return begins, ends

    def _reserve(self, link: int, ready_s: float, seconds: float) -> float:
        """Take the first gap of a link that is long enough: who is ready first is served first."""
        taken = self._taken[link]
        begin = ready_s
        if taken and taken[-1][1] > ready_s:  # otherwise all of it is free
            for taken_s, until_s in taken:
                if taken_s - begin >= seconds:
                    break
                if until_s > begin:
                    begin = until_s
        insort(taken, (begin, begin + seconds))
        if len(taken) > _REMEMBERED:
            del taken[0]
        return begin


def busy_seconds(tasks: Iterable[Task], *, link_of: Mapping[Lane, Lane] = _LINKS) -> Counter[Lane]:
    """Return how long every lane is busy with these tasks, lanes that share a link together."""
    busy: Counter[Lane] = Counter()
    for task in tasks:
        busy[link_of.get(task.lane, task.lane)] += task.seconds  # type: ignore[assignment]
    return busy


def steady(
    tasks: Sequence[Task], *, waits_for_compute: bool = False, link_of: Mapping[Lane, Lane] = _LINKS
) -> tuple[list[TaskSpan], list[TaskSpan]]:
    """Return when the tasks run in one of many equal steps, and in the step before it.

    The buffers' names tie a step to the next one. All that a step leaves for later is done before the next
    one's forward is over, so the second of two steps is like all that follow.

    Args:
        tasks: The tasks of one step.
        waits_for_compute: Whether the launching thread computes, as in `Timetable`.
        link_of: The link on which each lane takes turns, as in `Timetable`.
    """
    timetable = Timetable(waits_for_compute=waits_for_compute, link_of=link_of)
    before = timetable.place(tasks)
    return timetable.place(tasks), before


def steady_ends(
    tasks: Sequence[Task], *, waits_for_compute: bool = False, link_of: Mapping[Lane, Lane] = _LINKS
) -> tuple[list[float], list[float]]:
    """Return when the tasks end, as `steady` does, in half of the time."""
    timetable = Timetable(waits_for_compute=waits_for_compute, link_of=link_of)
    numbered = timetable.numbered(tasks)
    _, before = timetable.run(numbered)
    _, ends = timetable.run(numbered)
    return ends, before
