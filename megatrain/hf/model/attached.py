"""The engine of a trainer's model: it is made for it, or exists already; trainers may take it over."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn

from megatrain.errors import ConfigError
from megatrain.hf.arguments import MegatrainArguments
from megatrain.hf.optimizer import streamed
from megatrain.model.sequence.range import RowRange, row_range
from megatrain.model.sequence.scaling import scale_rope
from megatrain.model.weights.skeleton import read_config
from megatrain.stream.attach.attach import attach
from megatrain.stream.attach.load import load
from megatrain.stream.engine import Engine

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

_OF_LOADING = ("precision", "batch", "optimizer_state", "host_limit", "tiers", "ranks")
"""The keywords of `attach` that `load` takes too."""

_of_trainers: WeakSet[Engine] = WeakSet()
"""The engines that trainers have made."""


def engine_of(model: Any) -> Engine | None:
    """Return the engine to which a model is attached now, or None."""
    engine: Engine | None = getattr(model, "_megatrain_engine", None)
    return engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a trainer, beside `MegatrainArguments`, that decide how its model is attached."""

    args: TrainingArguments
    precision: str
    num_passes_before: int
    ranks: Ranks | Alone

    def of(self, config: PretrainedConfig) -> tuple[TrainingArguments, RowRange, str, int, Ranks | Alone]:
        """Return the settings for a model of this configuration, as `MegatrainArguments` takes them."""
        return self.args, row_range(config), self.precision, self.num_passes_before, self.ranks


def load_path(path: str, asked: MegatrainArguments, settings: Settings) -> PreTrainedModel:
    """Load a model straight into host memory.

    Raises:
        ConfigError: `model_init_kwargs` ask for something that this loader does not do, or rows are longer
            than the model takes.
        ModelError: `megatrain.load` raises it.
    """
    kwargs = dict(getattr(settings.args, "model_init_kwargs", None) or {})
    attention = kwargs.pop("attn_implementation", None)
    kwargs.pop("dtype", None)  # `precision_of` has read it
    if kwargs:
        scaled = {"rope_scaling", "rope_parameters"} & kwargs.keys()
        way = "MegatrainArguments(rope_scaling=...)" if scaled else "a model in place of its path"
        raise ConfigError(
            f"model_init_kwargs has {', '.join(sorted(kwargs))}, which megatrain.load does not take; "
            f"pass {way}"
        )
    config = read_config(path)
    scale_rope(config, asked.rope_scaling)
    given = asked.attach_settings(*settings.of(config))
    given = {name: given[name] for name in _OF_LOADING}
    scaling = asked.rope_scaling
    return load(path, asked.choice, attn_implementation=attention, rope_scaling=scaling, **given).train()


def attached(model: Any, asked: MegatrainArguments, settings: Settings) -> Engine:
    """Return the engine of a model, which is attached first if necessary.

    Raises:
        ConfigError: The model is attached in another way than the trainer asks for.
        MegatrainError: `attach` raises it.
    """
    engine, ranks = engine_of(model), settings.ranks
    if engine is None:
        engine = attach(model, asked.choice, **asked.attach_settings(*settings.of(model.config)))
        _of_trainers.add(engine)
    if engine.host.precision.value != settings.precision:
        raise ConfigError(
            f"bf16 is {bool(settings.args.bf16)} (TRL's default is True), but the model was attached "
            f"with precision={engine.host.precision.value!r}; pass the bf16 that fits it"
        )
    if engine.arrangement.binding.job.ranks is not ranks:
        raise ConfigError(
            f"the model was attached by one process alone, and {ranks.size} train together; pass "
            "its path, or the model as it was before attach"
        )
    return engine


def take_from_others(model: nn.Module, optimizer: Any) -> None:
    """Detach a model, or the part of one that is trained, from the engine of an earlier trainer.

    The trained weights stay, fp32 masters too; the optimizer's moments do not, as with the plain classes.

    Args:
        model: The model as it is given to a trainer.
        optimizer: The optimizer that is given with it.

    Raises:
        ConfigError: The user has attached the model, and its optimizer is another.
    """
    for earlier in list(_of_trainers):
        holds = engine_of(earlier.model) is earlier
        if holds and any(module is model for module in earlier.model.modules()):
            _log.info("the model was trained by another trainer before: it is attached anew")
            earlier.detach()
    engine = engine_of(model)
    if engine is not None and engine.optimizer not in (None, streamed(optimizer)):
        raise ConfigError(
            "the model's engine has an optimizer, and the trainer would make another; pass "
            "optimizers=(engine.optimizer, None) to go on with it, or call engine.detach() before"
        )


def leave_optimizer(engine: Engine) -> bool:
    """Detach a trainer's model from an engine that has an optimizer, before another one trains it.

    Returns:
        Whether it was detached; an engine that the user has made is kept, with its optimizer.
    """
    is_left = engine.optimizer is not None and engine in _of_trainers
    if is_left:
        _log.info("another optimizer is to train the model: it is attached anew, and moments begin anew")
        engine.detach()
    return is_left
