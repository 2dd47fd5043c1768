"""The class that is trained of a configuration: its causal language model, or the whole with its towers.

transformers builds a causal language model of many configurations that have a tower for images beside it. The
weights of the tower would be read by nobody, and missing from what is exported. So the class for images and
text is built where that is the whole model; rows of text do not pass its towers, which are frozen.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from megatrain.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def maker_of(config: PretrainedConfig, where: str = "") -> Any:
    """Return the auto class of transformers whose `from_config` makes the model that is trained.

    Args:
        config: The configuration as it was read.
        where: The words with which a sentence begins.

    Raises:
        ModelError: It is no decoder, or has parts that no class for images and text has; they are named.
    """
    kind, parts = type(config), _parts_left_out(config)
    if not parts:
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(f"{where}transformers has no causal language model for {kind.__name__}")
        return AutoModelForCausalLM
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder:
        model_class = _classes(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind])[0]
        if needed := _needed_beside_text(model_class):
            raise ModelError(
                f"{where}{model_class.__name__} takes no rows of text alone, which are what is trained here: "
                f"it needs {', '.join(needed)} too; give another model"
            )
        return AutoModelForImageTextToText
    raise ModelError(
        f"{where}{config.model_type} has parts beside its causal language model ({', '.join(parts)}), "
        "which would be lost: that alone would be trained and exported. Such models are not trained yet; "
        "give one that is a causal language model alone"
    )


def class_of(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that `maker_of` makes, the first one where it may be several; None: it makes none."""
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if _parts_left_out(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    found = mapping.get(type(config), None)
    return _classes(found)[0] if found is not None else None


def beside_text(model: PreTrainedModel) -> set[int]:
    """Return the ids of parameters that rows of text alone do not use: of towers beside a language model."""
    config = model.config
    if config.is_encoder_decoder or config.get_text_config() is config:
        return set()
    used = [model.get_decoder(), model.get_output_embeddings()]
    ids = {id(parameter) for module in used if module is not None for parameter in module.parameters()}
    return {id(parameter) for parameter in model.parameters()} - ids


def freeze_beside_text(model: PreTrainedModel) -> None:
    """Freeze the parameters of towers beside a language model: rows of text give them no gradient."""
    beside = beside_text(model)
    for parameter in model.parameters():
        if id(parameter) in beside:
            parameter.requires_grad_(False)


def _needed_beside_text(model_class: type[PreTrainedModel]) -> list[str]:
    """Name what the forward of a class needs beside the tokens of a text."""
    is_optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(model_class.forward).parameters
    return [
        name
        for name, parameter in parameters.items()
        if name not in ("self", "input_ids")
        and parameter.default is inspect.Parameter.empty
        and parameter.kind not in is_optional
    ]


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
