"""What an error of torch's in a step means for the model, in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.checkpoint import CheckpointError

from megatrain.errors import ModelError
from megatrain.hardware.determinism import why_not_deterministic

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def explained(error: BaseException, model: PreTrainedModel, device: torch.device) -> ModelError | None:
    """Return what to raise in an error's place; None: it says what is wrong by itself."""
    name = type(model).__name__
    if isinstance(error, CheckpointError):
        return ModelError(
            f"{name} has a block that does not compute the same twice (it keeps state between calls), so its "
            "activations cannot be recomputed; use activations='keep'"
        )
    reason = why_not_deterministic(error, device)
    return (
        None if reason is None else ModelError(f"{name} cannot train with train.deterministic=true: {reason}")
    )
