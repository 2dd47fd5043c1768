"""The settings of generation that lie beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from megatrain.errors import ModelError, first_line
from megatrain.hub import refuse_link_out


def take_generation_config(model: PreTrainedModel, path: str | Path) -> None:
    """Give a model the generation settings of a directory, if there are any.

    Raises:
        ModelError: The file is not valid.
    """
    generation = read_generation_config(Path(path))
    if generation is not None and model.can_generate():
        model.generation_config = generation


def read_generation_config(directory: Path) -> GenerationConfig | None:
    """Return the generation settings of a directory; None: there are none.

    Raises:
        ModelError: The file is not valid.
    """
    file = directory / "generation_config.json"
    if not file.exists():
        return None
    try:
        refuse_link_out(file)
        values = json.loads(file.read_text(encoding="utf-8"))
        return GenerationConfig.from_dict(values)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ModelError(f"{file} is not valid; correct or remove it: {first_line(error)}") from error


def stop_ids(path_or_id: str | Path, config: PretrainedConfig) -> list[int]:
    """Return the tokens at which `generate` stops: by the settings of generation, or those of the model.

    Args:
        path_or_id: A model directory, or the id of a model on the Hugging Face hub.
        config: The model's configuration.

    Raises:
        ModelError: The settings are refused, as by `read_generation_config`.
    """
    if Path(path_or_id).is_dir():
        settings = read_generation_config(Path(path_or_id))
    else:
        try:
            settings = GenerationConfig.from_pretrained(str(path_or_id))
        except OSError:  # the model has none, or the hub cannot be asked
            settings = None
    return ids_of_end(settings or GenerationConfig.from_model_config(config))


def ids_of_end(settings: GenerationConfig) -> list[int]:
    """Return the tokens at which `generate` stops by settings, which name one, several or none."""
    ids = getattr(settings, "eos_token_id", None)
    if ids is None:
        return []
    return [int(number) for number in (ids if isinstance(ids, (list, tuple)) else [ids])]
