"""The size of a run's micro-batches and the budget of its compiled layers, where settings leave them open.

What each comes to is looked at, the most telling first: powers of two, what lies between the best of them
and its neighbours, the budgets at the size that is found, and larger sizes with what these leave free. The
best of these looks are then searched to the end, and the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatrain.config import Config
from megatrain.config.budgets import ALL, BUDGETS
from megatrain.config.choice import AUTO, Choice
from megatrain.config.decided import micro_batch_sizes, with_budget, with_micro_batches
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.search.micro_batches import is_faster, look
from megatrain.plan.search.request import Request
from megatrain.plan.search.search import Found, search
from megatrain.train.planning.counting import PlannedModel

_LARGER_SIZES = 2
"""The number of larger sizes that are looked at with what a smaller budget leaves free."""

_NEARLY, _MOST_WHOLE = 1.02, 2
"""Times the fastest look up to which others are searched to the end too, and how many are at most."""


def with_fastest_size(
    config: Config, model: PlannedModel, device_type: str, ask: Callable[[Config, Anatomy], Request]
) -> tuple[Config, Choice | None]:
    """Return settings in which nothing is open, and the choice with which they are fastest, if it is known.

    Args:
        config: The settings, in which the step and `parallel.shards` are decided.
        model: The model that will be trained.
        device_type: The type of the device, as in `PlannedModel.count`.
        ask: The function that makes the request for decided settings and their count of the model.

    Raises:
        ConfigError: The step cannot be shared out.
        ModelError: The model cannot be counted.
    """
    is_open, budget = config.train.activation_budget == AUTO, config.activation_budget
    base = with_budget(config, budget)
    if config.is_decided:
        decided = {config.train.micro_batch_size: base}
    else:
        sizes = micro_batch_sizes(config, config.parallel.shards or 1)
        decided = {size: with_micro_batches(base, size) for size in sizes}
    if len(decided) == 1 and (not is_open or device_type == "cpu"):
        return next(iter(decided.values())), None
    looks = _Looks(decided, model, device_type, ask)
    sizes = list(decided)
    size = looks.best_size([each for each in sizes if each & (each - 1) == 0] or sizes, budget)
    place = sizes.index(size)
    size = looks.best_size(sizes[max(0, place - 1) : place + 2], budget)
    if is_open and looks.compiles(size, budget):
        for smaller in BUDGETS[1:]:
            if is_faster(looks.seconds(size, smaller), looks.seconds(size, budget)):
                budget = smaller
        if budget != ALL:
            place = sizes.index(size)
            looks.best_size(sizes[place : place + 1 + _LARGER_SIZES], budget)
    size, budget, found = looks.fastest(size, budget)
    return with_budget(decided[size], budget), None if found is None else found.choice


class _Looks:
    """What is known of the sizes and budgets that were looked at."""

    def __init__(
        self,
        decided: dict[int, Config],
        model: PlannedModel,
        device_type: str,
        ask: Callable[[Config, Anatomy], Request],
    ) -> None:
        self._decided, self._model, self._device_type, self._ask = decided, model, device_type, ask
        self._found: dict[tuple[int, float], Found | None] = {}

    def best_size(self, sizes: Sequence[int], budget: float) -> int:
        """Return the fastest of some sizes, the smallest first; those that are alike are counted at once."""
        self._model.count_each([self._decided[size] for size in sizes], self._device_type)
        best = sizes[0]
        for size in sizes[1:]:
            if is_faster(self.seconds(size, budget), self.seconds(best, budget)):
                best = size
        return best

    def seconds(self, size: int, budget: float) -> float:
        """Return the seconds of a step as a look finds it; infinite if nothing fits."""
        key = size, budget
        if key not in self._found:
            best = min(self._found, key=self._seconds_of, default=None)
            found = None if best is None else self._found[best]
            start = None if best is None or found is None else (best[0], found.choice)
            self._found[key] = look(self._request(size, budget), start)
        return self._seconds_of(key)

    def _seconds_of(self, key: tuple[int, float]) -> float:
        found = self._found[key]
        return float("inf") if found is None else found.step.step_s

    def fastest(self, size: int, budget: float) -> tuple[int, float, Found | None]:
        """Return the size and the budget of the fastest step, with what was found for them.

        Args:
            size: The size, and
            budget: the budget, where there was nothing to look at.
        """
        if not self._found:
            return size, budget, None
        by_time = sorted(self._found, key=self._seconds_of)
        nearly_s = _NEARLY * self._seconds_of(by_time[0])
        whole = [key for key in by_time[:_MOST_WHOLE] if self._seconds_of(key) <= nearly_s]
        for key in whole if len(whole) > 1 else ():
            self._search_whole(key)
        best, *others = sorted(whole, key=lambda key: (-key[1], key[0]))
        for key in others:
            if is_faster(self._seconds_of(key), self._seconds_of(best), is_whole=True):
                best = key
        return *best, self._found[best]

    def _search_whole(self, key: tuple[int, float]) -> None:
        found = self._found[key]
        if found is not None:
            self._found[key] = search(replace(self._request(*key), start=found.choice))

    def compiles(self, size: int, budget: float) -> bool:
        """Return whether layers are compiled, and it is known what they keep."""
        request = self._request(size, budget)
        return request.compiles and any(layer.compiled for layer in request.anatomy.layers)

    def _request(self, size: int, budget: float) -> Request:
        config = with_budget(self._decided[size], budget)
        return self._ask(config, self._model.count(config, self._device_type))
