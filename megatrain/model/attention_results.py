"""Which attention returns a log-sum-exp beside its output, so that its backward needs no second forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from megatrain.config.attention import BY_DOCUMENT, VARLEN
from megatrain.model.kernels import spares_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 64
"""The tokens of a call that asks which kernel torch takes."""


def is_softmax_attention(module: nn.Module) -> bool:
    """Whether a module is softmax attention, as transformers names it: LlamaAttention, GPT2Attention, ..."""
    name = type(module).__name__
    is_linear = any(word in name for word in ("Linear", "Lightning", "Gated"))
    return name.endswith("Attention") and not is_linear


def attends(layer: nn.Module) -> bool:
    """Whether a layer has softmax attention."""
    return any(map(is_softmax_attention, layer.modules()))


def runs_twice(layers: str, policy: str, why: str = "") -> str:
    """Say that attention runs twice although its results are to be kept.

    Args:
        layers: The class of the layers.
        policy: The name of the activation policy.
        why: The reason, if it is known.
    """
    because = why or (
        "no kernel returned a log-sum-exp that can be kept (the math path, eager attention, dropout in it, "
        "or compiled layers before which nothing is trained)"
    )
    return (
        f"activations={policy} keeps nothing of attention in layers of {layers}, which runs again in the "
        f"backward: {because}; activations=recompute costs the same"
    )


def why_none(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str:
    """Say why a model's attention returns no log-sum-exp; empty: it does, or only a step can tell.

    Args:
        model: The model.
        device: The device on which it computes.
        dtype: The dtype in which it computes.
    """
    config = model.config.get_text_config()
    name = getattr(config, "_attn_implementation", None)
    if name == "eager":
        return "eager attention returns no log-sum-exp"
    heads = getattr(config, "num_attention_heads", None)
    if name not in ("sdpa", VARLEN, BY_DOCUMENT) or not isinstance(heads, int):
        return ""
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "qk_nope_head_dim", None) is not None:  # multi-head latent attention
        size = config.qk_nope_head_dim + config.qk_rope_head_dim
    of_values = getattr(config, "v_head_dim", None) or size
    query, value = (
        torch.empty(1, heads, _TOKENS, each, device=device, dtype=dtype, requires_grad=True)
        for each in (size, of_values)
    )
    if spares_scores(query, query, value) is not False:
        return ""
    return f"torch has no kernel for heads of {size} on {device.type} but its math path"
