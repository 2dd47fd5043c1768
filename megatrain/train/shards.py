"""The number of runs in which the gradients of a step add up, where the user leaves it open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.config import Config
from megatrain.config.choice import AUTO
from megatrain.config.runs import Runs, num_places


def decided_shards(config: Config, num_ranks: int, meta: Mapping[str, Any] | None) -> int:
    """Return `parallel.shards`: as given, as in the checkpoint, or one per rank.

    Args:
        config: The settings of the run.
        num_ranks: The number of ranks that train together.
        meta: The record of the checkpoint; None if there is none.

    Raises:
        ConfigError: The ranks cannot share them out, or the micro-batches of a step cannot be cut so.
    """
    shards, sequence = config.parallel.shards, config.parallel.sequence
    if shards is None and meta is not None:
        shards = meta["config"].get("parallel", {}).get("shards", 1)
    shards = shards or num_places(num_ranks, sequence)
    number = config.train.grad_accumulation
    runs = Runs(shards) if number == AUTO else Runs.of(shards, number)
    runs.shared_out(num_ranks, sequence)
    return shards


def with_shards(config: Config, num_ranks: int, meta: Mapping[str, Any] | None) -> Config:
    """Return the settings with `parallel.shards` decided; arguments and errors are `decided_shards`'s."""
    shards = decided_shards(config, num_ranks, meta)
    parallel = config.parallel.model_copy(update={"shards": shards})
    return config.model_copy(update={"parallel": parallel})
