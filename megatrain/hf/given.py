"""What a streaming trainer is given, held against what can be streamed before anything is loaded."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from megatrain.errors import ConfigError
from megatrain.stream.optimizer import StreamedAdamW


def require_given(given: dict[str, Any]) -> TrainingArguments:
    """Return the arguments for training, after a check of what they come with.

    Raises:
        ConfigError: There are none, or what cannot be streamed.
    """
    args, optimizers = given.get("args"), given.get("optimizers") or (None, None)
    optimizer = optimizers[0]
    model = given.get("model")
    problems = [
        (args is None, "args is missing; pass TrainingArguments, or the config of TRL's trainer"),
        (
            given.get("model_init") is not None or model is None,
            "model is missing; pass a model or a path, and no model_init: a model is attached once",
        ),
        (
            given.get("optimizer_cls_and_kwargs") is not None
            or not isinstance(optimizer, (StreamedAdamW, type(None))),
            f"optimizers holds {type(optimizer).__name__}; a streamed model is trained by AdamW of its "
            "engine: leave it out, or pass optimizers=(engine.adamw(...), None)",
        ),
        (
            given.get("quantization_config") is not None,
            "quantization_config: streamed weights are exact and need no room on the device; leave it out",
        ),
    ]
    for is_wrong, message in problems:
        if is_wrong:
            raise ConfigError(message)
    assert isinstance(args, TrainingArguments)
    return args
