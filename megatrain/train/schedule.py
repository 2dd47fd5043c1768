"""The learning rate of a run, step by step, by the schedules of transformers."""

from __future__ import annotations

import math

import torch

from megatrain.config import Config
from megatrain.errors import ConfigError


def make_schedule(
    config: Config, optimizer: torch.optim.Optimizer, num_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule that `optim` asks for.

    Args:
        config: The settings of the run.
        optimizer: The optimizer whose rate it sets.
        num_steps: The number of steps of the whole run.

    Raises:
        ConfigError: The schedule does not take its arguments.
    """
    from transformers import get_scheduler

    optim = config.optim
    warmup = optim.warmup_steps
    try:
        scheduler: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
            optim.schedule,
            optimizer,
            num_warmup_steps=warmup if isinstance(warmup, int) else math.ceil(warmup * num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=dict(optim.schedule_args) or None,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optim.schedule {optim.schedule} does not take {optim.schedule_args} (schedule_args): {error}"
        ) from error
    return scheduler
