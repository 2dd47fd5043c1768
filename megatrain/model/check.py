"""Checks all of a model that can be, before anything is tokenised, planned or allocated for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.model.causal import refuse_encoder
from megatrain.model.sequence.scaling import require_scaled, scale_rope
from megatrain.model.weights.files import PlannedWeights, model_directory
from megatrain.model.weights.skeleton import build_skeleton, read_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_checked(
    path: str | Path, *, has_weights: bool, rope_scaling: Mapping[str, Any] | None = None
) -> tuple[PretrainedConfig, Path | None]:
    """Read the configuration of a model, and check that it can be trained and that its files are whole.

    Of the files of weights, headers and sizes are read, and no tensor.

    Args:
        path: Model directory or hub id.
        has_weights: A claim that weights are read from there.
        rope_scaling: The scaling of rotary embeddings that the configuration is given, as in `scale_rope`.

    Returns:
        The configuration; the directory of the weights, None if they are not read.

    Raises:
        ModelError: The model is not trained here, or its files cannot be used, with the reason.
        ConfigError: The model cannot be scaled so.
    """
    config = read_config(path)
    refuse_encoder(config)
    scale_rope(config, rope_scaling)
    model = build_skeleton(config, dtype=torch.float32)
    require_scaled(model, rope_scaling)
    place = model_directory(path) if has_weights else None
    if place is not None:
        PlannedWeights(model, place)
    return config, place
