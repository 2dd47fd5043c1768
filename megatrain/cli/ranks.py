"""The option `--ranks` of `megatrain train`, and what torchrun says in the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatrain.errors import ConfigError

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.distributed.ranks import Ranks


def start_ranks(config: Config, ranks: int, arguments: Sequence[str], *, dry_run: bool) -> int:
    """Run the same command once per rank, and return the exit code of all.

    Args:
        config: What the arguments say.
        ranks: How many.
        arguments: Of the command line, but for the number of ranks.
        dry_run: The command was only to try the run out.

    Raises:
        ConfigError: So many cannot run here.
    """
    from megatrain.config.runs import check_shards
    from megatrain.distributed.launch import run_ranks
    from megatrain.hardware.accelerators import accelerator

    if dry_run:
        raise ConfigError("--dry-run tries out one rank; leave --ranks away")
    try:
        check_shards(ranks)
    except ValueError as error:
        raise ConfigError(f"--ranks is {ranks}; {error}") from None
    if config.train.device != "cpu" and (config.train.device != "auto" or accelerator() is not None):
        raise ConfigError(
            f"--ranks is {ranks} and train.device is {config.train.device}: several ranks run on the CPU so "
            "far; use train.device=cpu"
        )
    shards = config.parallel.shards
    return run_ranks(ranks, arguments, shards=shards, say=logging.getLogger(__name__).warning)


def join_ranks(progress: Callable[[str], object]) -> Ranks | None:
    """Join the ranks that this process was started with, and let the first one speak for all.

    Args:
        progress: Said what is being done so far.

    Raises:
        ConfigError: As `Ranks`.
    """
    from megatrain.distributed.launch import join

    joined = join(os.environ)
    if joined is not None and joined.rank > 0:
        logging.disable(logging.WARNING)
        progress("")
    return joined
