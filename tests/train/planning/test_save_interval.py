"""When a run saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.config.types import seconds_between
from megatrain.train.planning.save_interval import (
    LEAST_S,
    SaveInterval,
    is_timed,
    least_interval,
    planned_interval,
    planned_wait,
    wear_interval,
)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("every", "due"),
    [
        (2, [2, 4, 6, 8]),
        ("epoch", [5]),
        ("epoch/2", [3, 6]),
        (None, []),
    ],
)
def test_steps(every: int | str | None, due: list[int]) -> None:
    interval = SaveInterval(every, 5)
    assert [step for step in range(1, 9) if interval.is_due(step)] == due
    assert not interval.is_timed


def test_a_time_counts_from_the_last_checkpoint() -> None:
    clock = Clock()
    interval = SaveInterval("30min", 5, clock=clock)
    assert interval.is_timed
    due = []
    for step in range(1, 100):
        clock.now += 100
        if interval.is_due(step):
            due.append(step)
            interval.begun()
    assert due == [18, 36, 54, 72, 90]


def test_auto_lets_the_drive_outlive_the_run() -> None:
    """A drive rated for 1.2 PB, of which state takes 0.2 PB, in 30 days: 1.44 TB every 62 minutes."""
    plan: Any = SimpleNamespace(drive_written_bytes=2 * 10**9, step_s=25.92)
    given: dict[str, Any] = {"nbytes": 1_440 * 10**9, "num_steps": 100_000}
    wear_s = wear_interval(plan, rated_bytes=1.2e15, **given)
    assert wear_s == pytest.approx(2_592_000 * 1.44e12 / 1e15)
    assert wear_s / 60 == pytest.approx(62.2, abs=0.1)
    assert wear_interval(plan, rated_bytes=1.2e15, written_bytes=5e14, **given) == pytest.approx(2 * wear_s)
    assert wear_interval(plan, rated_bytes=None, **given) == 0.0
    assert wear_interval(plan, rated_bytes=1e14, **given) == 0.0, "state alone uses it up"
    clock = Clock()
    interval = SaveInterval("auto", 5, wear_s=wear_s, clock=clock)
    for _ in range(2):
        clock.now += wear_s - 1
        assert not interval.is_due(1)
        clock.now += 2
        assert interval.is_due(2)
        interval.begun()
        interval.took(0.0)
    assert planned_interval("auto", 100, step_s=1.0, wait_s=0.0, wear_s=wear_s) == wear_s


def test_auto_saves_as_often_as_costs_two_percent() -> None:
    clock = Clock()
    interval = SaveInterval("auto", 5, clock=clock)
    clock.now += LEAST_S - 1
    assert not interval.is_due(1)
    clock.now += 1
    assert interval.is_due(2)
    interval.begun()
    interval.took(93.0)  # a write of 127 s behind a step of 34 s
    clock.now += 93.0 / 0.02 - 1
    assert not interval.is_due(3)
    clock.now += 1
    assert interval.is_due(4)
    assert least_interval(93.0) / 60 == pytest.approx(77.5)
    assert least_interval(0.0) == LEAST_S
    interval.took(1.0)
    assert interval.is_due(5)


@pytest.mark.parametrize(
    ("every", "seconds"), [("30min", 1800.0), ("2h", 7200.0), ("epoch", None), (5, None)]
)
def test_times(every: int | str, seconds: float | None) -> None:
    assert seconds_between(every) == seconds


def test_a_plan_foresees_the_time_between_checkpoints() -> None:
    """The 120B figures of the design: a write of 127 s behind a step of 34 s is more than an hour apart."""
    rates: dict[str, Any] = {"step_s": 34.0, "write_bytes_per_s": 1e9, "read_bytes_per_s": 2e9}
    wait_s = planned_wait(nbytes=int(127e9), away_bytes=0, **rates)
    assert wait_s == pytest.approx(93.0 + 3.4)
    assert planned_wait(nbytes=1000, away_bytes=0, **rates) == pytest.approx(3.4)
    assert planned_wait(nbytes=int(127e9), away_bytes=int(100e9), **rates) == pytest.approx(100.0 + 3.4)
    slow = rates | {"read_bytes_per_s": 5e8}
    assert planned_wait(nbytes=int(127e9), away_bytes=int(100e9), **slow) == pytest.approx(200.0 + 3.4)
    given: dict[str, Any] = {"step_s": 34.0, "wait_s": wait_s}
    assert planned_interval("auto", 100, **given) == pytest.approx(96.4 / 0.02)  # 1 h 20 min
    assert planned_interval("auto", 100, **given | {"wait_s": 3.4}) == LEAST_S
    assert planned_interval("auto", 100, **given | {"wait_s": 0.0, "step_s": 900.0}) == 900.0
    assert planned_interval("30min", 100, **given) == 1800.0
    assert planned_interval(500, 100, **given) == 17_000.0
    assert planned_interval("epoch/4", 100, **given) == 850.0
    assert planned_interval(None, 100, **given) is None
    assert [is_timed(each) for each in ("auto", "2h", "epoch", 5, None)] == [True, True, False, False, False]
