"""Refuses configurations of a model that has parts beside its causal language model.

Such a part is a vision tower, or the encoder before a decoder. transformers builds the language model alone,
so the weights of the rest would be read by nobody, and missing from what is exported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from megatrain.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def refuse_parts(config: PretrainedConfig, where: str = "") -> None:
    """Refuse a configuration whose causal language model is not the whole model.

    Args:
        config: The configuration as it was read.
        where: The words with which the sentence begins.

    Raises:
        ModelError: The model has parts that would be left out; they are named.
    """
    parts = _parts_left_out(config)
    if parts:
        raise ModelError(
            f"{where}{config.model_type} has parts beside its causal language model ({', '.join(parts)}), "
            "which would be lost: that alone would be trained and exported. Such models are not trained yet; "
            "give one that is a causal language model alone"
        )


def _parts_left_out(config: PretrainedConfig) -> list[str]:
    """Name the parts of a model that its causal language model does not have; of other models, nothing."""
    kind = type(config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return []
        classes = _classes(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind])
        return _towers(config) or [each.__name__ for each in classes]
    classes = _classes(MODEL_FOR_CAUSAL_LM_MAPPING[kind])
    if config.sub_configs and kind not in {each.config_class for each in classes}:
        return _towers(config)
    if config.is_encoder_decoder and not config.sub_configs:
        return ["an encoder: is_encoder_decoder"]
    names = {each.__name__ for each in classes}
    saved = [name for name in config.architectures or () if name.endswith("ForConditionalGeneration")]
    return [name for name in saved if name not in names]


def _towers(config: PretrainedConfig) -> list[str]:
    """Name the configurations inside of one that are not of its text."""
    text = config.get_text_config() if hasattr(config, "text_config") else None
    return [name for name in config.sub_configs if getattr(config, name, None) not in (None, text)]


def _classes(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)
