"""The choice of the size of a run's micro-batches, where its settings leave that open."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.config import Config
from megatrain.config.decided import micro_batch_sizes, with_micro_batches
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.search.micro_batches import fastest
from megatrain.plan.search.request import Request
from megatrain.train.planning.counting import PlannedModel


def with_fastest_size(
    config: Config, model: PlannedModel, device_type: str, ask: Callable[[Config, Anatomy], Request]
) -> Config:
    """Return settings in which nothing is open, since the planner has chosen the size of micro-batches.

    Args:
        config: The settings, in which the step and `parallel.shards` are decided.
        model: The model that will be trained.
        device_type: The type of the device, as in `PlannedModel.count`.
        ask: The function that makes the request for decided settings and their count of the model.

    Raises:
        ConfigError: The step cannot be shared out.
        ModelError: The model cannot be counted.
    """
    if config.is_decided:
        return config
    sizes = micro_batch_sizes(config, config.parallel.shards or 1)
    decided = [with_micro_batches(config, size) for size in sizes]
    if len(decided) == 1:
        return decided[0]
    anatomies = model.count_each(decided, device_type)
    requests = [ask(each, anatomy) for each, anatomy in zip(decided, anatomies, strict=True)]
    return decided[requests.index(fastest(requests))]
