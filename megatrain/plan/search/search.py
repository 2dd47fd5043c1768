"""The fastest choice that fits: choices are timed, the most promising first.

A choice's bound, below which no order of its work can be, takes microseconds, its timetable milliseconds. A
choice whose bound is above the best time so far cannot be better and is not timed, so the result is the best
of all that were listed. Where the budget ends first, it is the best of those that were timed. The budget is a
number of operations, not of seconds: the same request has the same plan on a busy machine as on a quiet one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatrain.config.choice import AUTO, Choice
from megatrain.plan.cost.step_time import Step
from megatrain.plan.search.choices import (
    Breadth,
    have_late_rows,
    lacks_ram,
    like,
    list_choices,
    on_device_alone,
    with_activations_on_drives,
)
from megatrain.plan.search.filling import refined
from megatrain.plan.search.neighbours import neighbours
from megatrain.plan.search.options import chunk_counts, values_of
from megatrain.plan.search.placing import SMALL, sum_options
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


def search(request: Request, *, budget: int = SEARCH_OPERATIONS, enough_s: float = 0.0) -> Found | None:
    """Return the fastest choice that fits, or the first one that is fast enough; None: none fits.

    From the best of a few that differ much, everything is tried that can be changed about it, as long as it
    gets better. Then the main questions are asked with all their answers, and what can be changed about the
    best of these is tried, and about those that were nearly as good. All of this is done for sums of several
    rounds on the device, and then, with as much to spend again, for sums on the host, which have to be faster
    than what was found: so they never cost a plan its speed. Where state is on drives anyway, sums on drives
    are tried after that, and activations there last: both leave RAM to the state. Sums on drives are looked
    at like any others where nothing fits without them. Around what was found, policies are tried that
    `Policy.refines` says.

    All of this is done again with experts in chunks of two sizes, where a layer's are large.

    Where RAM leaves something to wish for, all of this is done again with resident blocks whose state is on
    the device and nowhere else, in three numbers of them, which have to be faster than what was found.

    Args:
        request: The request to plan.
        budget: The number of operations that are placed before the best choice so far is taken.
        enough_s: The seconds of a step with which the search ends.
    """
    asked = request, budget, enough_s
    for known, found in _LATELY:
        if known == asked:
            return found
    found = _searched(*asked)
    _LATELY.append((asked, found))
    return found


_LATELY: deque[tuple[tuple[Request, int, float], Found | None]] = deque(maxlen=4)
"""What was asked lately in this process, and found: the plan of a size has been searched for to choose it."""


def _searched(request: Request, budget: int, enough_s: float) -> Found | None:
    best = _near(request, budget, enough_s) if enough_s > 0 else None
    if best is None:
        best = _search(request, budget, enough_s)
    for number in chunk_counts(request) if request.choice.expert_chunks == AUTO else ():
        if best is None or best.step.step_s > enough_s:
            chunked = replace(request, choice=replace(request.choice, expert_chunks=number))
            best = _search(chunked, budget, enough_s, best) or best
    if best is not None and (best.step.step_s <= enough_s or not lacks_ram(request)):
        return best
    for asked in on_device_alone(request):
        best = _search(asked, budget, enough_s, best) or best
    return best


def _near(request: Request, budget: int, enough_s: float) -> Found | None:
    """Return a choice that is like the request's start and fast enough; None: there is none."""
    if request.start is None:
        return None
    race = _Race(_with_sums(request, request.start.sums), budget, enough_s)
    race.run_like_start()
    if race.best is None or race.best.step_s > enough_s:
        return None
    return Found(race.best.choice, race.best, race.num_timed, race.is_over)


def _search(request: Request, budget: int, enough_s: float, best: Found | None = None) -> Found | None:
    """Return the fastest choice; None: none fits, or none is faster than the best of another request."""
    first, *others = values_of(request.choice.sums, sum_options(request))
    others = others if request.batch.num_micro_batches > 1 else []
    race = _Race(_with_sums(request, first), budget, enough_s, None if best is None else best.step)
    if best is not None and request.choice.expert_chunks not in (AUTO, 1):
        race.run_a_few()  # other numbers of chunks differ little, and a visit of each is short
    else:
        race.run_all()
    if race.best is None and "nvme" in others:
        race = _Race(_with_sums(request, "nvme"), budget, enough_s)
        race.run_all()
    is_cut_short = race.is_over
    if race.best is None:
        return None
    if "host" in others:
        race.go_on(_with_sums(request, "host"), budget)
        race.run_all()
        is_cut_short |= race.is_over
    elsewhere = [_with_sums(request, "nvme")] if "nvme" in others and race.best.choice.sums != "nvme" else []
    # what attention returned of a long row is worth a drive, where RAM has no room for all of it
    asks = have_late_rows(request) or race.best.choice.uses_drives
    for asked in (*elsewhere, with_activations_on_drives(request)):
        if asked is not None and asks and race.best.choice.boundaries != "nvme":
            race.begin_with(asked, budget)
            is_cut_short |= race.is_over
    if best is not None and race.best is best.step:
        return None
    race.refine(request, budget // 2)
    return Found(race.best.choice, race.best, race.num_timed, is_cut_short)


def _with_sums(request: Request, sums: str) -> Request:
    return replace(request, choice=replace(request.choice, sums=sums))


class _Race:
    """Times choices, the most promising first, and keeps the best."""

    def __init__(self, request: Request, budget: int, enough_s: float, best: Step | None = None) -> None:
        self._request = request
        self._budget = budget
        self._enough_s = enough_s
        self._seen: set[Choice] = set()
        self._timed: dict[Choice, float] = {}
        self._started: set[Choice] = set() if best is None else {best.choice}
        self._least_rounds = 1
        self.best = best
        """So far: at first that of another request, or none."""
        self.num_timed = 0
        self.is_over = False
        """The budget ended before every promising choice was timed."""

    def run_like_start(self) -> None:
        """Look at what is like the request's start, if that adds up where this request does."""
        request = self._request
        if request.start is not None and request.start.sums == request.choice.sums:
            self.run(like(request, request.start))

    def run_a_few(self) -> None:
        """Look at a few choices that differ much, and at what is near the best of them."""
        self.run_like_start()
        self.run(list_choices(self._request, Breadth.COARSE))
        self.climb(_FIRST_STARTS)

    def run_all(self) -> None:
        """Look at everything, from what differs much to what differs little."""
        request = self._request
        self.run_like_start()
        self.run(list_choices(request, Breadth.COARSE))
        self.climb(_FIRST_STARTS)
        self.run(list_choices(request, Breadth.MAIN))
        if self.best is None or len(request.anatomy.layers) <= SMALL:
            self.run(list_choices(request))
        self.climb(_MOST_STARTS)

    def go_on(self, request: Request, budget: int) -> None:
        """Let sums be where a request has them, in steps of several rounds, with so much to spend."""
        self._request = request
        self._budget = budget
        self._least_rounds = 2
        self.is_over = False
        self._started |= self._timed.keys()
        self.run(
            [replace(choice, sums=request.choice.sums) for choice in self._timed if self._is_good(choice)]
        )

    def begin_with(self, request: Request, budget: int) -> None:
        """Look at a few choices of another request that differ much, and at what is near the best of them."""
        self._request = request
        self._budget = budget
        self._least_rounds = 1
        self.is_over = False
        self._started |= self._timed.keys()
        self.run(list_choices(request, Breadth.COARSE))
        self.climb(_FIRST_STARTS)

    def refine(self, request: Request, budget: int) -> None:
        """Let policies that are tried last have layers of the best choice, with so much to spend."""
        assert self.best is not None
        before = self.best
        self._request = request
        self._budget = budget
        self._least_rounds = 1
        self.run(refined(request, before.choice))
        if self.best is not before:
            self._started |= self._timed.keys() - {self.best.choice}
            self.climb(_FIRST_STARTS)

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
        others = {c: seconds for c, seconds in self._timed.items() if c not in self._started}
        if self.best.choice in others:
            choice = self.best.choice
        else:
            choice = min(others, key=lambda c: others[c], default=self.best.choice)
        if choice in self._started or not self._is_good(choice):
            return None
        self._started.add(choice)
        return choice

    def _is_good(self, choice: Choice) -> bool:
        return self.best is not None and self._timed[choice] <= self.best.step_s * _NEARLY

    def run(self, choices: Iterable[Choice]) -> None:
        """Time those that can be better than the best so far, the most promising first."""
        request, count = self._request, self._request.batch.num_micro_batches
        listed: list[tuple[float, int, float, Step]] = []
        for choice in choices:
            if choice in self._seen or choice.num_rounds(count) < self._least_rounds:
                continue
            self._seen.add(choice)
            if self._has_ended():
                return
            self._budget -= len(request.anatomy.layers)
            step = request.step(choice)
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
        """Return whether the budget is spent, or the best is fast enough: not before a choice is found."""
        self.is_over = self.best is not None and (self._budget <= 0 or self.best.step_s <= self._enough_s)
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
        choice.sums != "device",
        len(choice.tiers),
        choice.boundaries != "device",
        sum(policy.is_intricate for policy in choice.policies),
        choice.has_scratch_on_drives,
        any(place != "host" for place in choice.gradients),
        choice.fragments,
        choice.expert_chunks > 1,
        choice.outer_streams,
        len(set(choice.activations)),
        choice.resident_layers,
        choice.num_slots,
        -choice.lockstep,
    )
