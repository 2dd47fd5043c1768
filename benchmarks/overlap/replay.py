"""Run a step's tasks on emulated lanes and measure; also the same in arithmetic, to know the lanes' error.

Times that are reported are measured: every task is enqueued in real lanes (threads that sleep for as long as
the task would take, with jitter), and clocks are read when they run. `pace` is the wall time of one modelled
second. The arithmetic timetable is used to choose the pace and to fit rates, and is shown beside.
"""

from __future__ import annotations

import gc
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.overlap.work import Rates, Step
from megatrain.plan.cost.timetable import Task as TimedTask
from megatrain.plan.cost.timetable import Timetable
from megatrain.plan.program.operations import Lane
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine, Span

JITTER_S = 5e-5
"""Every operation begins up to this much late, in the machine's own time: launches and wake-ups."""
PATIENCE_S = 0.2
"""How late a thread of a busy computer may wake and still keep to the lanes' timetable: a late wake-up then
shows at the mark where it happens, and the median over steps leaves it out; it does not add up."""
SWITCH_S = 2e-4
"""How long a thread may keep the interpreter while others want it: 5 ms by default, as long as a task."""

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A replay, in seconds of the machine."""

    step_s: float
    arithmetic_s: float
    limits: dict[str, float]
    device_idle: float
    """Part of the step in which the device does not compute."""
    optimizer_hidden: float
    """Part of the host's optimizer work during which the device computes."""
    launch_s: float
    """Time in which the launching thread enqueued a step, as wall time."""
    median_task_s: float
    """Median wall time of a compute task: what jitter and sleeps are to be compared with."""
    pace: float

    @property
    def bound_s(self) -> float:
        """The least possible step."""
        return max(self.limits.values())

    @property
    def bound_by(self) -> str:
        """What the least possible step is made of."""
        return max(self.limits, key=lambda name: self.limits[name])

    @property
    def over_bound(self) -> float:
        """Step over bound."""
        return self.step_s / self.bound_s

    @property
    def drift(self) -> float:
        """How much longer the replay took than the same program in arithmetic."""
        return self.step_s / self.arithmetic_s - 1


def measure(step: Step, *, wall_s: float, num_steps: int = 4, seed: int = 0) -> Measured:
    """Replay a step until it is steady.

    Args:
        step: What to replay.
        wall_s: About how long one step shall take.
        num_steps: Steps to run; the median of all but the first is taken. Where steps do not overlap one is
            enough, and takes the time of all.
        seed: Of the jitter.
    """
    rates = step.costs.rates
    arithmetic = step_seconds(step)
    alone = step.marked < 0
    count = 1 if alone else num_steps
    pace = wall_s * num_steps / count / arithmetic
    spans, marks, launch_s = _run(step, rates, pace, count, seed)
    start, stop = marks[0], marks[-1]
    step_s = statistics.median(late - early for early, late in pairwise(marks)) / pace
    compute_s = step.seconds(Lane.COMPUTE)
    busy = _merge((s.start_s, s.end_s) for s in spans if s.lane is Lane.COMPUTE)
    updates = _merge(
        (max(s.start_s, start), min(s.end_s, stop))
        for s in spans
        if s.lane is Lane.HOST and s.label == "update" and s.end_s > start and s.start_s < stop
    )
    update_s = sum(end - begin for begin, end in updates)
    return Measured(
        step_s=step_s,
        arithmetic_s=arithmetic,
        limits=step.limits(),
        device_idle=1 - compute_s / step_s,
        optimizer_hidden=_overlap(updates, busy) / update_s if update_s else 1.0,
        launch_s=launch_s / count,
        median_task_s=statistics.median(
            s.end_s - s.start_s for s in spans if s.lane is Lane.COMPUTE and s.end_s > s.start_s
        ),
        pace=pace,
    )


def _run(
    step: Step, rates: Rates, pace: float, num_steps: int, seed: int
) -> tuple[list[Span], list[float], float]:
    machine = EmulatedMachine.from_rates(rates.mapping(), scale=1 / pace)
    machine = replace(machine, device_bytes=None, jitter_s=JITTER_S * pace, catch_up_s=PATIENCE_S, seed=seed)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.disable()
    marks = [time.perf_counter()] if step.marked < 0 else []
    reached = [threading.Event() for _ in range(num_steps)]
    lanes = EmulatedLanes(machine)
    try:
        launch_s = 0.0
        for number in range(num_steps):
            if number >= 2:  # one step ahead and no more
                reached[number - 2].wait()
            started = time.perf_counter()
            for position, task in enumerate(step.tasks):
                function = _nothing
                if position == step.marked:

                    def function(event: threading.Event = reached[number]) -> None:
                        marks.append(time.perf_counter())
                        event.set()

                lanes.enqueue(
                    task.lane,
                    function,
                    reads=task.reads,
                    writes=task.writes,
                    work=task.work,
                    label=task.kind,
                )
            launch_s += time.perf_counter() - started
        lanes.drain()
        spans = lanes.take_record().spans
        if step.marked < 0:
            marks.append(max(span.end_s for span in spans))
        return spans, marks, launch_s
    finally:
        lanes.close()
        gc.enable()
        sys.setswitchinterval(interval)


def _nothing() -> None:
    pass


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _overlap(these: list[Interval], those: list[Interval]) -> float:
    total, at = 0.0, 0
    for begin, end in these:
        while at < len(those) and those[at][1] <= begin:
            at += 1
        number = at
        while number < len(those) and those[number][0] < end:
            total += min(end, those[number][1]) - max(begin, those[number][0])
            number += 1
    return total


def step_seconds(step: Step) -> float:
    """Return the seconds of a steady step by arithmetic: no threads, no jitter."""
    rates = step.costs.rates
    tasks = [
        TimedTask(task.lane, task.work / rates.rate(task.lane), task.reads, task.writes, task.kind)
        for task in step.tasks
    ]
    timetable = Timetable()
    if step.marked < 0:
        return max(span.end_s for span in timetable.place(tasks))
    begins = [timetable.place(tasks)[step.marked].begin_s for _ in range(3)]
    return (begins[2] - begins[0]) / 2
