"""Scales a model's rotary embeddings, so that rows may be longer than those it was trained on.

The scaling is written into the configuration, as transformers has it, before the model is built: transformers
computes with it, and whoever reads the saved model does too. `max_position_embeddings` is what each kind of
scaling takes it for. For YaRN it is the longer range, and the range before is
`original_max_position_embeddings`. For linear scaling it stays the range before, unless kinds of layers have
rotary embeddings of their own.

Sources: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023
(arXiv 2309.00071); Chen et al., "Extending Context Window of Large Language Models via Positional
Interpolation", 2023 (arXiv 2306.15595).

This module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatrain.config.rope import YARN, described, read_rope_scaling
from megatrain.errors import ConfigError, first_line
from megatrain.model.sequence.range import FULL, kinds_of, rope_parameters, row_range

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_NOT_OF_SCALING = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "type")
"""Parameters of rotary embeddings that stay whatever their scaling is."""
_ORIGINAL = "original_max_position_embeddings"


def scale_rope(config: PretrainedConfig, scaling: Mapping[str, Any] | None) -> None:
    """Write a scaling of rotary embeddings into a configuration, in place.

    A configuration that has this very scaling is left as it is.

    Args:
        config: The configuration of a model.
        scaling: The scaling, as `read_rope_scaling` takes it; None does nothing.

    Raises:
        ConfigError: The scaling is not valid, the model has no rotary embeddings to scale, or they are
            scaled in another way.
    """
    if scaling is None:
        return
    asked = read_rope_scaling(scaling)
    text: Any = config.get_text_config()
    name, kinds = text.model_type, kinds_of(text)
    own: Any = None if kinds and FULL not in kinds else rope_parameters(text)[0]
    if not own:
        which = f" in layers with full attention (they are for {', '.join(kinds)})" if kinds else ""
        raise ConfigError(
            f"rope_scaling is {described(asked)}, but the {name} model has no rotary embeddings{which}; "
            "leave rope_scaling out"
        )
    if own.get("rope_type", "default") != "default":
        _require_same(own, asked, name)
        return
    named = getattr(text, "max_position_embeddings", None)
    native: Any = asked.get(_ORIGINAL, named)
    if not isinstance(named, int):
        raise ConfigError(
            f"rope_scaling is {described(asked)}, but the {name} model names no max_position_embeddings that "
            "could become longer; leave rope_scaling out"
        )
    if native > named:
        raise ConfigError(
            f"rope_scaling has {_ORIGINAL} {native}, but the {name} model has max_position_embeddings {named}"
            f"; use {named} or less, or leave it out"
        )
    own.update(asked)
    if "type" in own:
        own["type"] = asked["rope_type"]
    if asked["rope_type"] == YARN:
        own[_ORIGINAL] = native
        if hasattr(text, _ORIGINAL):  # where a configuration has it there, transformers takes that
            setattr(text, _ORIGINAL, native)
        if getattr(text, "head_dim", 0) is None:  # transformers' YaRN takes it for a number
            text.head_dim = text.hidden_size // text.num_attention_heads
    if kinds or asked["rope_type"] == YARN:
        text.max_position_embeddings = int(native * asked["factor"])
    text.standardize_rope_params()
    _require_readable(config, asked, name)


def _require_readable(config: PretrainedConfig, asked: Mapping[str, Any], name: str) -> None:
    """Refuse what transformers would not read again from a config.json, or would read as something else."""
    values = config.to_dict()
    try:
        again: Any = type(config).from_dict(values)
    except Exception as error:  # each configuration class validates in its own way
        why = f"its configuration refuses it ({first_line(error)})"
    else:
        if row_range(again) == row_range(config):
            return
        why = "its configuration reads it as something else"
    raise ConfigError(
        f"rope_scaling is {described(asked)}, which the {name} model cannot have: {why}; leave "
        "rope_scaling out"
    )


def _require_same(own: Mapping[str, Any], asked: Mapping[str, Any], name: str) -> None:
    has = {key: value for key, value in own.items() if key not in _NOT_OF_SCALING and value is not None}
    wanted = dict(asked)
    if _ORIGINAL in has:
        wanted.setdefault(_ORIGINAL, has[_ORIGINAL])
    if has != wanted:
        first = {key: has[key] for key in ("rope_type", "factor") if key in has}
        said = ", ".join(f"{key} {_short(value)}" for key, value in (first | has).items())
        raise ConfigError(
            f"rope_scaling is {described(asked)}, but the {name} model has rotary embeddings that are scaled "
            f"in another way: {said}; leave rope_scaling out, or give a model whose config.json has none"
        )


def _short(value: Any) -> str:
    return f"of {len(value)} numbers" if isinstance(value, list) else str(value)


def require_scaled(model: nn.Module, scaling: Mapping[str, Any] | None) -> None:
    """Refuse a model that has not taken over the scaling in its configuration.

    Args:
        model: The model, with weights or without.
        scaling: The scaling that was asked for; None: there is none to take over.

    Raises:
        ConfigError: None of its modules computes with it.
    """
    if scaling is None:
        return
    asked = read_rope_scaling(scaling)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if asked["rope_type"] in (kinds.values() if isinstance(kinds, dict) else [kinds]):
            return
    config: Any = model.config
    raise ConfigError(
        f"rope_scaling is {described(asked)}, but the {config.get_text_config().model_type} model computes "
        "no rotary embeddings with it; leave rope_scaling out"
    )
