"""`megatrain.fit`: what `megatrain train` does, from Python, with callbacks of your own."""

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
    """Train as `megatrain train` does, or go on with a run that was stopped.

    Args:
        config: A YAML file, or its sections as nested mappings.
        overrides: Such as `optim.lr=1e-5`; they win.
        callbacks: Of transformers' Trainer; called as it calls them.

    Returns:
        The run directory, with the model in `hf/`.

    Raises:
        MegatrainError: Its subclasses say what is wrong.
        SystemExit: 75, after a signal or a callback has stopped the run, whose state is saved.
    """
    from megatrain.train.loop import train

    source, raw = ("settings", config) if isinstance(config, Mapping) else (str(config), read_config(config))
    settings = build_config(apply_overrides(raw, overrides), source=source)
    return train(settings, resume=settings.checkpoint.resume, callbacks=callbacks)
