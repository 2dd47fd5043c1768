"""Decides in micro-batches of which size a run's rows pass, where its settings leave that open."""

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
    """Return settings in which nothing is open: the planner has chosen the size of micro-batches.

    Args:
        config: In which the step is decided, and `parallel.shards`.
        model: That will be trained.
        device_type: As in `PlannedModel.count`.
        ask: Makes the request for settings in which nothing is open, and the count of the model for them.

    Raises:
        ConfigError: The step cannot be shared out.
        ModelError: A model that cannot be counted.
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
