"""The optimizer of a streaming trainer: its engine's AdamW, also in place of torch's."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import Trainer

from megatrain.errors import ConfigError
from megatrain.stream.engine import Engine
from megatrain.stream.optimizer import StreamedOptimizer

_log = logging.getLogger(__name__)

_INSTEAD = (
    "a streamed model is trained by AdamW of its engine: pass torch.optim.AdamW with groups of the model's "
    "parameters, or engine.adamw(...), or leave it out"
)


def require_kind(kind: Any, where: str) -> None:
    """Refuse an optimizer of another class than AdamW's, before anything is loaded.

    Args:
        kind: The class of the optimizer.
        where: The name of the argument that gives it.

    Raises:
        ConfigError: The class is another.
    """
    if kind is not torch.optim.AdamW and not (isinstance(kind, type) and issubclass(kind, StreamedOptimizer)):
        raise ConfigError(f"{where} names {getattr(kind, '__name__', kind)}; {_INSTEAD}")


def streamed(optimizer: Any) -> StreamedOptimizer | None:
    """Return the engine's optimizer inside what accelerate may have wrapped; None if it is another."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, StreamedOptimizer) else None


def names_optimizer(create: Any) -> bool:
    """Return whether a trainer's class makes or names an optimizer in another way than the plain class.

    Args:
        create: The trainer's method `create_optimizer`.
    """
    named = type(create.__self__).get_optimizer_cls_and_kwargs
    return (create.__func__, named) != (Trainer.create_optimizer, Trainer.get_optimizer_cls_and_kwargs)


def require_new(optimizer: Any) -> None:
    """Refuse an optimizer that the engine's cannot replace.

    Raises:
        ConfigError: The optimizer is not torch's AdamW, or has trained already.
    """
    require_kind(type(optimizer), "the trainer")
    if optimizer.state:
        raise ConfigError(
            "torch.optim.AdamW was given after it has trained, with moments that the engine does not take "
            "over; pass a new one"
        )


def as_streamed(
    engine: Engine, optimizer: Any, *, max_grad_norm: float | None, seed: int
) -> StreamedOptimizer:
    """Return an optimizer of the engine in place of torch's AdamW, with its groups.

    Args:
        engine: The engine of the model, which has no optimizer yet.
        optimizer: The optimizer that the trainer is given or makes; `require_new` has accepted it.
        max_grad_norm: The norm to clip to, by the trainer's arguments.
        seed: The seed for the rounding of moments.

    Raises:
        ConfigError: The optimizer has parameters that are not the model's.
    """
    found = engine.adamw(groups=optimizer.param_groups, max_grad_norm=max_grad_norm, seed=seed)
    _log.info(
        "torch.optim.AdamW: its %d groups of parameters are trained by the engine's AdamW, which is "
        "trainer.optimizer",
        len(found.param_groups),
    )
    return found


def require_its_schedule(scheduler: Any, optimizer: Any) -> None:
    """Refuse a schedule of another optimizer, since it would not change the rates of the model's.

    Raises:
        ConfigError: The schedule belongs to another optimizer.
    """
    changed = getattr(scheduler, "optimizer", None)
    if isinstance(changed, torch.optim.Optimizer) and streamed(changed) is not streamed(optimizer):
        raise ConfigError(
            f"the schedule changes the rates of a {type(changed).__name__}, and the engine's AdamW trains "
            "the model; make it of trainer.optimizer (in create_scheduler), or of engine.adamw(...) of a "
            "model that is attached, or leave it to lr_scheduler_type"
        )
