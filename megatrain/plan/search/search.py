"""The fastest choice that fits: choices are timed, the most promising first.

A choice's bound, below which no order of its work can be, takes microseconds, its timetable milliseconds. A
choice whose bound is above the best time so far cannot be better and is not timed, so the result is the best
of all that were listed. Where the budget ends first, it is the best of those that were timed. The budget is a
number of operations, not of seconds: the same request has the same plan on a busy machine as on a quiet one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.config.choice import Choice
from megatrain.plan.cost.step_time import Step
from megatrain.plan.search.choices import Breadth, list_choices
from megatrain.plan.search.neighbours import neighbours
from megatrain.plan.search.placing import SMALL
from megatrain.plan.search.request import Request, overflow

SEARCH_OPERATIONS = 30_000
"""Operations that are placed in timetables before the best choice so far is taken: under a second of a core.

To look at a choice, at its memory and its bounds, counts as one for every layer."""

_NEARLY = 1.15
"""Times the best: choices up to this are changed further too."""

_FIRST_STARTS, _MOST_STARTS = 4, 40
"""Choices whose neighbours are tried: before the main questions are asked everywhere, and after."""

_TOLERANCE = 1e-3
"""Two step times that differ by less are equal: the simpler choice wins."""


@dataclass(frozen=True, slots=True)
class Found:
    """A choice that fits, with its time."""

    choice: Choice
    step: Step
    num_timed: int
    is_cut_short: bool
    """The budget ended before every promising choice was timed."""


def search(request: Request, *, budget: int = SEARCH_OPERATIONS) -> Found | None:
    """Return the fastest choice that fits; None: none does.

    From the best of a few that differ much, everything is tried that can be changed about it, as long as it
    gets better. Then the main questions are asked with all their answers, and what can be changed about the
    best of these is tried, and about those that were nearly as good.
    """
    race = _Race(request, budget)
    race.run(list_choices(request, Breadth.COARSE))
    race.climb(_FIRST_STARTS)
    race.run(list_choices(request, Breadth.MAIN))
    if race.best is None or len(request.anatomy.layers) <= SMALL:
        race.run(list_choices(request))
    race.climb(_MOST_STARTS)
    if race.best is None:
        return None
    return Found(race.best.choice, race.best, race.num_timed, race.is_over)


class _Race:
    """Times choices, the most promising first, and keeps the best."""

    def __init__(self, request: Request, budget: int) -> None:
        self._request = request
        self._budget = budget
        self._seen: set[Choice] = set()
        self._timed: dict[Choice, float] = {}
        self._started: set[Choice] = set()
        self.best: Step | None = None
        self.num_timed = 0
        self.is_over = False
        """The budget ended before every promising choice was timed."""

    def climb(self, most_starts: int) -> None:
        """Change one thing at a time of the best choice, as long as that helps, and then of good ones."""
        for _ in range(most_starts):
            start = self._next_start()
            if start is None:
                return
            self.run(neighbours(self._request, start))

    def _next_start(self) -> Choice | None:
        """Return the best choice whose neighbours were not tried, if it is nearly as good as the best."""
        if self.best is None or self.is_over:
            return None
        most = self.best.step_s * _NEARLY
        others = {c: seconds for c, seconds in self._timed.items() if c not in self._started}
        if self.best.choice in others:
            choice = self.best.choice
        else:
            choice = min(others, key=lambda c: others[c], default=self.best.choice)
        if choice in self._started or self._timed[choice] > most:
            return None
        self._started.add(choice)
        return choice

    def run(self, choices: Iterable[Choice]) -> None:
        """Time those that can be better than the best so far, the most promising first."""
        request = self._request
        listed: list[tuple[float, int, float, Step]] = []
        for choice in choices:
            if choice in self._seen:
                continue
            self._seen.add(choice)
            if self._has_ended():
                return
            self._budget -= len(request.anatomy.layers)
            step = Step(request.rates, request.anatomy, choice, request.batch, clips=request.clips)
            limits = step.bounds_s.values()
            if self.best is not None and max(limits) > self.best.step_s * (1 + _TOLERANCE):
                continue
            listed.append((_estimate(limits), len(listed), max(limits), step))
        listed.sort(key=lambda item: item[:2])
        for _, _, bound_s, step in listed:
            if self.best is not None and bound_s > self.best.step_s * (1 + _TOLERANCE):
                continue
            if self._has_ended():
                return
            if overflow(request, step.choice):
                continue
            self.num_timed += 1
            self._timed[step.choice] = step.step_s
            self._budget -= step.num_placed
            if self.best is None or _is_better(step, self.best):
                self.best = step

    def _has_ended(self) -> bool:
        """Whether the budget is spent: not before there is a choice to take."""
        self.is_over = self.best is not None and self._budget <= 0
        return self.is_over


def _estimate(limits: Iterable[float]) -> float:
    """Guess a step's time from its bounds: lanes that are nearly as busy as the busiest get in its way."""
    return float(sum(limit**6 for limit in limits) ** (1 / 6))


def _is_better(step: Step, best: Step) -> bool:
    if step.step_s < best.step_s * (1 - _TOLERANCE):
        return True
    is_equal = step.step_s <= best.step_s * (1 + _TOLERANCE)
    return is_equal and _complexity(step.choice) < _complexity(best.choice)


def _complexity(choice: Choice) -> tuple[int, ...]:
    """Order choices of equal speed: fewer moving parts first, then fewer bytes on the device."""
    return (
        len(choice.tiers),
        choice.boundaries != "device",
        sum(policy in ("offload", "drop_boundary") for policy in choice.activations),
        choice.sums != "device",
        choice.has_scratch_on_drives,
        any(place != "host" for place in choice.gradients),
        choice.fragments,
        choice.outer_streams,
        len(set(choice.activations)),
        choice.resident_layers,
        choice.num_slots,
        -choice.lockstep,
    )
