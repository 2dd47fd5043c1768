"""The precision in which the model of a trainer is trained: that of `bf16`, or that of the model.

Without `bf16=True`, the plain class trains weights in their own dtype, which is bf16 for most checkpoints,
and rounds every update to it. Here such weights have exact fp32 masters.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain.model.weights.files import checkpoint_dtype, model_directory
from megatrain.model.weights.skeleton import read_config

if TYPE_CHECKING:
    from transformers import TrainingArguments

_log = logging.getLogger(__name__)

_AUTO = (None, "auto")
"""The values of `dtype` that mean that of the checkpoint."""


def precision_of(args: TrainingArguments, model: Any) -> str:
    """Return `bf16` or `fp32`, and log one line about the meaning where the plain class does otherwise.

    Args:
        args: The arguments of the trainer.
        model: The model that the trainer is given: a module, or a path or hub id.
    """
    if args.bf16:
        _log.info(
            "bf16=True: weights and compute are in bf16, with exact fp32 masters; there is no autocast, and "
            "the model is saved in bf16"
        )
        return "bf16"
    found = _of_module(model) if isinstance(model, nn.Module) else _of_path(args, model)
    if found is torch.bfloat16:
        _log.warning(
            "the model is in bf16: its weights and compute stay so, as with bf16=True, and have exact fp32 "
            "masters (the plain trainer would round each update to bf16); load it with dtype=torch.float32 "
            "to train in fp32"
        )
        return "bf16"
    if found is not torch.float32:
        _log.warning("the model is in %s: it is trained and saved in fp32", str(found).removeprefix("torch."))
    return "fp32"


def _of_module(model: nn.Module) -> torch.dtype:
    """Return the dtype of most of the weights, since some may be kept in fp32, adapters among them."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _of_path(args: TrainingArguments, path: str | Path) -> torch.dtype:
    """Return the dtype in which the plain class would load the weights."""
    unsaid = "float32" if hasattr(args, "model_init_kwargs") else None  # TRL's arguments, and its loading
    dtype: Any = (getattr(args, "model_init_kwargs", None) or {}).get("dtype", unsaid)
    if dtype in _AUTO:
        config = read_config(path)
        dtype = config.dtype or config.get_text_config().dtype or checkpoint_dtype(model_directory(path))
    found: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return found
