"""The language model inside a configuration, which may be of a larger model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForImageTextToText
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megatrain.errors import ModelError
from megatrain.model.weights.skeleton import (
    build_skeleton,
    first_line,
    initialise_buffers,
    parameters_on_meta,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Built:
    """A language model without weights."""

    model: PreTrainedModel
    part: str
    """Empty, or which part of the configuration's model this is."""
    num_params: int
    """Of the configuration's whole model."""


def build_language_model(
    config: PretrainedConfig, *, dtype: torch.dtype, attn_implementation: str | None = None
) -> Built:
    """Build the causal language model of a configuration on the meta device.

    Of a model of language and images, that is what `text_config` describes, with the head.

    Raises:
        ModelError: transformers has no such model, or cannot build it.
    """
    text = config.get_text_config()
    if text is config:
        model = build_skeleton(config, dtype=dtype, attn_implementation=attn_implementation)
        return Built(model, "", num_parameters(model))
    part = "language tower (text_config)"
    whole = _build_whole(config, dtype, attn_implementation)
    num_params = num_parameters(whole)
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model = build_skeleton(text, dtype=dtype, attn_implementation=attn_implementation)
        return Built(model, part, num_params)
    base = whole.base_model
    language = getattr(base, "language_model", None)
    if language is None:
        raise ModelError(
            f"the {config.model_type} model has no part language_model; give its text model alone"
        )
    for name, child in list(base.named_children()):
        if child is not language:
            delattr(base, name)
    initialise_buffers(whole)
    return Built(whole.eval(), part, num_params)


def _build_whole(
    config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str | None
) -> PreTrainedModel:
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.random.fork_rng(devices=[]), no_init_weights(), parameters_on_meta():
        try:
            model: PreTrainedModel = AutoModelForImageTextToText.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=False, **options
            )
        except Exception as error:  # a constructor fails in its own way on values that do not fit together
            raise ModelError(f"the {config.model_type} model cannot be built: {first_line(error)}") from error
    model.tie_weights(recompute_mapping=False)
    return model


def num_parameters(model: PreTrainedModel) -> int:
    """Count the elements of all parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
