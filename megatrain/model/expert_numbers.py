"""How many experts a layer has, and how many of them a token passes, by a model's configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megatrain.errors import ModelError
from megatrain.model.layer_configs import layer_configs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_NUM_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts", "top_k")
_OF_GENERATION = "top_k"
"""It may also say from how many words a text is drawn."""


def experts_of(config: PretrainedConfig) -> tuple[int, int] | None:
    """Return the experts of a layer and of a token; None: there are none, or the config does not say."""
    for layer in layer_configs(config.get_text_config()):
        total, active = _first(layer, _NUM_EXPERTS), _first(layer, _NUM_ACTIVE)
        if total and active:
            return total[1], active[1]
    return None


def require_possible(config: PretrainedConfig) -> None:
    """Refuse a configuration in which a token passes no expert, or more experts than a layer has.

    Raises:
        ModelError: It does.
    """
    try:
        text = config.get_text_config()
    except ValueError:  # there are several; which one is meant is for the model's class to say
        return
    for layer in layer_configs(text):
        total = _first(layer, _NUM_EXPERTS)
        named = ((name, getattr(layer, name, None)) for name in _NUM_ACTIVE if name != _OF_GENERATION)
        active = next(((name, value) for name, value in named if type(value) is int), None)
        if total is None or active is None or type(total[1]) is not int or total[1] < 2:
            continue  # one expert, or none, is a dense model, whatever else is said of experts
        if not 1 <= active[1] <= total[1]:
            raise ModelError(
                f"config.json has {active[0]} {active[1]} and {total[0]} {total[1]}: a token passes 1 to "
                f"{total[1]} experts of a layer; correct {active[0]}"
            )


def _first(config: PretrainedConfig, names: Iterable[str]) -> tuple[str, Any] | None:
    """Return the first of some settings that is neither missing nor zero, with its name."""
    return next(((name, value) for name in names if (value := getattr(config, name, None))), None)
