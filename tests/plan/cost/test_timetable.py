"""Timetables that can be worked out by hand."""

from __future__ import annotations

import pytest

from megatrain.plan.cost.timetable import Task, TaskSpan, Timetable, links, steady
from megatrain.plan.program.buffers import Buffer
from megatrain.plan.program.kinds import Lane


def task(lane: Lane, seconds: float, reads: str = "", writes: str = "") -> Task:
    """Return a task with buffers named by single letters."""

    def buffers(names: str) -> tuple[Buffer, ...]:
        return tuple((name, 0) for name in names)

    return Task(lane, seconds, buffers(reads), buffers(writes), "")


def spans(*tasks: Task) -> list[tuple[float, float]]:
    return [(span.begin_s, span.end_s) for span in Timetable().place(tasks)]


def test_a_lane_works_in_order_and_lanes_work_together() -> None:
    assert spans(task(Lane.COMPUTE, 2), task(Lane.COMPUTE, 3), task(Lane.HOST, 4)) == [(0, 2), (2, 5), (0, 4)]


def test_a_reader_waits_for_its_writer() -> None:
    assert spans(task(Lane.FETCH, 3, writes="a"), task(Lane.COMPUTE, 2, reads="a")) == [(0, 3), (3, 5)]


def test_a_writer_waits_for_the_readers_and_the_writer_before() -> None:
    assert spans(
        task(Lane.FETCH, 1, writes="a"),
        task(Lane.COMPUTE, 5, reads="a"),
        task(Lane.FETCH, 1, writes="a"),
        task(Lane.HOST, 1, writes="a"),
    ) == [(0, 1), (1, 6), (6, 7), (7, 8)]


def test_two_slots_hide_copies_behind_compute() -> None:
    """Fetches of 2 s and visits of 3 s: after the first fetch, compute never waits."""
    tasks = []
    for number in range(4):
        slot = "ab"[number % 2]
        tasks += [task(Lane.FETCH, 2, writes=slot), task(Lane.COMPUTE, 3, reads=slot)]
    assert spans(*tasks)[1::2] == [(2, 5), (5, 8), (8, 11), (11, 14)]


def test_one_slot_takes_turns() -> None:
    tasks = [part for _ in range(3) for part in (task(Lane.FETCH, 2, writes="a"), task(Lane.COMPUTE, 3, "a"))]
    assert spans(*tasks)[1::2] == [(2, 5), (7, 10), (12, 15)]


def test_fetches_and_restores_share_a_link() -> None:
    assert spans(task(Lane.FETCH, 3), task(Lane.RESTORE, 2), task(Lane.OFFLOAD, 4), task(Lane.SAVE, 1)) == [
        (0, 3),
        (3, 5),
        (0, 4),
        (4, 5),
    ]


def test_who_is_ready_first_takes_the_gap_of_a_link() -> None:
    """A restore that fits before a fetch which waits for compute is not kept behind it."""
    assert spans(
        task(Lane.COMPUTE, 5, writes="a"), task(Lane.FETCH, 2, reads="a"), task(Lane.RESTORE, 4)
    ) == [(0, 5), (5, 7), (0, 4)]


def test_drives_that_share_take_turns() -> None:
    tasks = [task(Lane.READ, 2), task(Lane.WRITE, 3)]
    assert Timetable().place(tasks) == [TaskSpan(0, 2), TaskSpan(0, 3)]
    assert Timetable(link_of=links(drives_share=True)).place(tasks) == [TaskSpan(0, 2), TaskSpan(2, 5)]


def test_steady_steps_overlap_where_buffers_allow() -> None:
    """Updates of 4 s run behind the next step's first compute of 6 s: a step takes 9 s and not 13."""
    tasks = [
        task(Lane.COMPUTE, 6),
        task(Lane.COMPUTE, 3, reads="w", writes="g"),
        task(Lane.HOST, 4, reads="g", writes="w"),
    ]
    second, first = steady(tasks)
    assert first[2].end_s == 13
    assert second[1].end_s - first[1].end_s == pytest.approx(9)


def test_steady_steps_wait_for_updates_that_are_longer() -> None:
    tasks = [
        task(Lane.COMPUTE, 1),
        task(Lane.COMPUTE, 3, reads="w", writes="g"),
        task(Lane.HOST, 4, reads="g", writes="w"),
    ]
    second, first = steady(tasks)
    assert second[1].end_s - first[1].end_s == pytest.approx(7)
