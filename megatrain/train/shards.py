"""In how many runs the gradients of a step add up: what the user leaves open is decided here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.config import Config
from megatrain.config.choice import AUTO
from megatrain.config.runs import Runs, num_places


def decided_shards(config: Config, num_ranks: int, meta: Mapping[str, Any] | None) -> int:
    """Return `parallel.shards`: as given, as the checkpoint's, or one per rank.

    Args:
        config: Of the run.
        num_ranks: That train together.
        meta: Of the checkpoint; None: there is none.

    Raises:
        ConfigError: Ranks cannot share them out, or the micro-batches of a step cannot be cut so.
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
    """Return the settings with `parallel.shards` decided; arguments and errors are of `decided_shards`."""
    shards = decided_shards(config, num_ranks, meta)
    parallel = config.parallel.model_copy(update={"shards": shards})
    return config.model_copy(update={"parallel": parallel})
