"""The check of a streaming trainer's arguments against what can be streamed, before anything is loaded."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from megatrain.errors import ConfigError
from megatrain.hf.optimizer import require_kind


def require_given(given: dict[str, Any]) -> TrainingArguments:
    """Return the training arguments, after a check of the other arguments.

    Raises:
        ConfigError: There are no training arguments, or the model cannot be streamed with the others.
    """
    args, optimizers = given.get("args"), given.get("optimizers") or (None, None)
    model = given.get("model")
    problems = [
        (args is None, "args is missing; pass TrainingArguments, or the config of TRL's trainer"),
        (
            given.get("model_init") is not None or model is None,
            "model is missing; pass a model or a path, and no model_init: a model is attached once",
        ),
        (
            given.get("quantization_config") is not None,
            "quantization_config: streamed weights are exact and need no room on the device; leave it out",
        ),
    ]
    for is_wrong, message in problems:
        if is_wrong:
            raise ConfigError(message)
    if optimizers[0] is not None:
        require_kind(type(optimizers[0]), "optimizers")
    if (named := given.get("optimizer_cls_and_kwargs")) is not None:
        require_kind(named[0], "optimizer_cls_and_kwargs")
    assert isinstance(args, TrainingArguments)
    return args
