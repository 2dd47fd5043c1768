"""The size of a run's micro-batches and the budget of its compiled layers, where settings leave them open."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from megatrain.config import Config
from megatrain.config.budgets import ALL, BUDGETS
from megatrain.config.choice import AUTO
from megatrain.config.decided import micro_batch_sizes, with_budget, with_micro_batches
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.search.micro_batches import fastest
from megatrain.plan.search.request import Request
from megatrain.train.planning.counting import PlannedModel

_LARGER_SIZES = 2
"""The number of larger sizes that are looked at with what a smaller budget leaves free."""


def with_fastest_size(
    config: Config, model: PlannedModel, device_type: str, ask: Callable[[Config, Anatomy], Request]
) -> Config:
    """Return settings in which nothing is open, since the planner has chosen size and budget.

    The size is chosen first, for layers that keep all. A smaller budget has to be faster.

    Args:
        config: The settings, in which the step and `parallel.shards` are decided.
        model: The model that will be trained.
        device_type: The type of the device, as in `PlannedModel.count`.
        ask: The function that makes the request for decided settings and their count of the model.

    Raises:
        ConfigError: The step cannot be shared out.
        ModelError: The model cannot be counted.
    """
    given = config.train.activation_budget
    base = config if given != AUTO else with_budget(config, ALL)
    if config.is_decided:
        decided = [base]
    else:
        sizes = micro_batch_sizes(config, config.parallel.shards or 1)
        decided = [with_micro_batches(base, size) for size in sizes]
    if len(decided) == 1 and (given != AUTO or device_type == "cpu"):
        return decided[0]
    anatomies = model.count_each(decided, device_type)
    asked = list(zip(decided, anatomies, strict=True))
    place = _fastest([ask(*each) for each in asked])
    counts = [layer.compiled for layer in anatomies[place].layers]
    if given != AUTO or not ask(*asked[place]).compiles or not any(counts):
        return decided[place]
    others = product(BUDGETS[1:], asked[place : place + 1 + _LARGER_SIZES])
    asked = [asked[place], *((with_budget(each, budget), anatomy) for budget, (each, anatomy) in others)]
    return asked[_fastest([ask(*each) for each in asked])][0]


def _fastest(requests: list[Request]) -> int:
    """Return the place of the request whose plan should be the fastest."""
    return 0 if len(requests) == 1 else requests.index(fastest(requests))
