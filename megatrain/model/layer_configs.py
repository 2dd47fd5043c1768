"""The configuration of one layer: a value that layers have each for themselves is not read from the whole.

transformers refuses the reading of such a value (`AmbiguousGlobalPerLayerAttributeError`), as of the size of
heads in Gemma 4, whose layers with global attention have larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def layer_config(config: PretrainedConfig, number: int) -> PretrainedConfig:
    """Return the configuration of a layer; of most models it is that of all.

    Args:
        config: The configuration of a language model.
        number: The layer, counted from 0.
    """
    layers = layer_configs(config)
    return layers[number] if 0 <= number < len(layers) else layers[0]


def layer_configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """Return the configurations of the layers; of most models there is one for all."""
    if getattr(config, "is_heterogeneous", False):  # older releases of transformers have no such models
        layers: Sequence[PretrainedConfig] = config.per_layer_config
        return layers
    return (config,)
