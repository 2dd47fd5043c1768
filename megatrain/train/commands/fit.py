"""`megatrain.fit` does from Python what `megatrain train` does, with callbacks of your own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import apply_overrides, build_config, read_config

if TYPE_CHECKING:
    from transformers import TrainerCallback


def fit(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *overrides: str,
    callbacks: Sequence[TrainerCallback] = (),
) -> Path:
    """Train as `megatrain train` does, or resume a run that was stopped.

    Args:
        config: The path of a YAML file, or its sections as nested mappings.
        overrides: The overrides, such as `optim.lr=1e-5`, which win.
        callbacks: The callbacks, of transformers' Trainer, which are called as it calls them.

    Returns:
        The run directory, with the model in `hf/`.

    Raises:
        MegatrainError: The subclass says what is wrong.
        SystemExit: 75, after a signal or a callback has stopped the run, whose state is saved.
    """
    from megatrain.train.loop import train

    source, raw = ("settings", config) if isinstance(config, Mapping) else (str(config), read_config(config))
    settings = build_config(apply_overrides(raw, overrides), source=source)
    return train(settings, resume=settings.checkpoint.resume, callbacks=callbacks)
