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
            f"the head of {name} does not compute the same twice, so it cannot run in chunks; use a "
            "head_chunk_tokens as large as a micro-batch"
        )
    reason = why_not_deterministic(error, device)
    return (
        None if reason is None else ModelError(f"{name} cannot train with train.deterministic=true: {reason}")
    )
