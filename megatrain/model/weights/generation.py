"""The settings of generation that lie beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel

from megatrain.errors import ModelError, first_line


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
        values = json.loads(file.read_text(encoding="utf-8"))
        return GenerationConfig.from_dict(values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is not valid; correct or remove it: {first_line(error)}") from error
