"""A plan as `plan.json` of a run keeps it: its numbers, and a timeline of the lanes within a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeAlias

from megatrain.plan.cost.economics import economics
from megatrain.plan.cost.timetable import steady
from megatrain.train.planning.plan_json import plan_json
from megatrain.train.planning.plan_run import Planned

MOST_SPANS = 2000
"""The largest number of spans of a timeline; beyond it, neighbours of one kind are drawn as one."""

Span: TypeAlias = tuple[str, str, float, float]
"""A lane, its work, and the begin and end in seconds of the step."""


def planned_run(planned: Planned, num_steps: int) -> dict[str, Any]:
    """Return the plan of a run, and a timeline of its step, as plain values."""
    plan, request = planned.plan, planned.request
    money = economics(plan, request.spec, request.anatomy, tokens=plan.batch.step_tokens * num_steps)
    memory = {"host_plane_bytes": plan.host_plane_bytes, "device_pool_bytes": plan.device_pool_bytes}
    return {**plan_json(planned, money, []), **memory, "timeline": timeline(planned)}


def timeline(planned: Planned) -> list[Span]:
    """List the work and times of each lane in one of many equal steps; of many rounds, the first three."""
    plan, request = planned.plan, planned.request
    spec = request.spec
    step = replace(request, batch=plan.batch).step(plan.choice)
    tasks, _ = step.tasks(is_short=True)
    if spec.is_cpu:  # a CPU does everything in turn
        ends = list(accumulate(task.seconds for task in tasks))
        times = [(end - task.seconds, end) for task, end in zip(tasks, ends, strict=True)]
    else:
        placed, _ = steady(tasks, waits_for_compute=spec.launches_inline, link_of=step.link_of)
        times = [(span.begin_s, span.end_s) for span in placed]
    spans = [
        (task.lane.value, task.kind, begin_s, end_s)
        for task, (begin_s, end_s) in zip(tasks, times, strict=True)
        if end_s > begin_s
    ]
    zero_s = min((span[2] for span in spans), default=0.0)
    return thinned([(lane, kind, begin - zero_s, end - zero_s) for lane, kind, begin, end in spans])


def thinned(spans: Sequence[Span], most: int = MOST_SPANS) -> list[Span]:
    """Merge neighbours of one lane and kind, the nearest first, until there are few."""
    length_s = max((span[3] for span in spans), default=0.0)
    found = sorted(spans, key=lambda span: span[2])
    gap_s = 0.0
    while True:
        found = _joined(found, gap_s)
        if len(found) <= most or gap_s > length_s:
            return [(lane, kind, round(begin, 6), round(end, 6)) for lane, kind, begin, end in found]
        gap_s = 2 * gap_s or length_s / 10_000


def _joined(spans: Sequence[Span], gap_s: float) -> list[Span]:
    last: dict[str, int] = {}
    found: list[Span] = []
    for lane, kind, begin_s, end_s in spans:
        at = last.get(lane)
        if at is not None and found[at][1] == kind and begin_s - found[at][3] <= gap_s:
            found[at] = (lane, kind, found[at][2], max(end_s, found[at][3]))
        else:
            last[lane] = len(found)
            found.append((lane, kind, begin_s, end_s))
    return found
