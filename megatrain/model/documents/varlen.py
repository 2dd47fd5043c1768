"""Attention within each document of packed rows, without a mask: two attention functions of transformers'.

`varlen` is torch's variable-length flash attention, for accelerators; `sdpa_by_document` attends within one
document after the other, for the CPU. Both are told where documents begin, as `begins` reads it on the host,
and no mask is made for packed rows then, of sliding windows neither, if the model tells its layers of them.
All other rows, and layers that need a mask for another reason (chunks, padding), go the way of `sdpa`, whose
mask says all; where rows are too long for a mask, that of attention by tiles.

Sources: torch's `nn/attention/varlen.py`, of 2.11 and 2.13, whose signatures differ.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from megatrain.config.attention import BY_DOCUMENT, VARLEN
from megatrain.errors import ModelError
from megatrain.model.documents import tiled
from megatrain.model.documents.begins import packed_now, tells_windows
from megatrain.model.documents.sight import Sight
from megatrain.model.masks import is_long

_UNKNOWN = ("softcap", "s_aux", "position_bias")
"""The arguments of attention functions that change scores, of which the ones here know nothing."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Sight | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attend within documents, if there is no mask and it is told where they begin; else as `sdpa`.

    Args:
        module: The module of the attention.
        query: The queries, (B, heads, T, D).
        key: The keys, (B, key heads, T, D).
        value: The values, in the form of `key`.
        attention_mask: The mask, which says all; None where there is none.
        given: What else the model passes on.

    Returns:
        (B, T, heads, D); no weights.

    Raises:
        ModelError: The model wants something of attention without a mask that this one does not do.
    """
    if isinstance(attention_mask, Sight):  # long rows, of which there is no mask
        return tiled.attend(module, query, key, value, attention_mask, **given)
    starts = given.get("cu_seq_lens_q")
    if starts is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    for name in _UNKNOWN:
        if given.get(name) is not None:
            raise ModelError(f"attention within documents knows no {name}, which a layer gives it")
    if given.get("is_causal") is False or given.get("dropout") or query.shape[2] != key.shape[2]:
        raise ModelError("attention within documents is causal, without dropout, and of whole rows")
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    config: Any = module.config
    attend = _varlen if config._attn_implementation == VARLEN else _by_document
    output = attend(
        q, k, v, starts, given["max_length_q"], given.get("scaling"), given.get("sliding_window") or None
    )
    return output.unflatten(0, (query.shape[0], -1)), None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Attend by torch's kernel, all (tokens, heads, D); a window counts the token itself."""
    attend, takes = kernel()
    settings: dict[str, Any] = {}
    if "window_size" in takes:
        settings["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is not None and window < longest:
        raise ModelError("this version of torch has no attention in windows without a mask")
    else:
        settings["is_causal"] = True
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in takes:
            settings["enable_gqa"] = True
        elif "window_size" in takes:  # before it was asked for, every head had keys of its own
            key, value = (
                each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value)
            )
    if "scale" in takes:
        settings["scale"] = scale
    elif scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    output: Tensor = attend(query, key, value, starts, starts, longest, longest, **settings)
    return output


@functools.cache
def kernel() -> tuple[Any, frozenset[str]]:
    """Return torch's variable-length attention, and the names of its arguments, which differ by version."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


@torch.compiler.disable
def _by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Attend within one document after the other, all (tokens, heads, D)."""
    lengths = [number for number in starts.diff().tolist() if number]
    parts = []
    # one node of autograd for all documents: a slice of each would be as wide as the row in the backward
    for apart in zip(*(each.split(lengths) for each in (query, key, value)), strict=True):
        number, mask = len(apart[0]), None
        if window is not None and window < number:
            mask = torch.ones(number, number, dtype=torch.bool).tril().triu(1 - window)
        q, k, v = (each[None].transpose(1, 2) for each in apart)
        output = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        parts.append(output[0].transpose(0, 1))
    return torch.cat(parts)


def _has_windows(config: Any) -> bool:
    """Whether layers attend in sliding windows without a mask: the model tells them, and the kernel can."""
    if config is None:
        return False
    is_able = config._attn_implementation == BY_DOCUMENT or "window_size" in kernel()[1]
    return is_able and tells_windows(config)


def _mask(**given: Any) -> Tensor | Sight | None:
    """Make the mask that `sdpa` gets, but none of packed rows alone, and of no long rows."""
    packed, local_size, length = packed_now(), given.get("local_size"), given["kv_length"]
    if (
        packed is not None
        and packed.is_packed
        and packed.shape in (None, (given["batch_size"], length))
        and given["q_length"] == length
        and given.get("attention_mask") is None
        and not given.get("use_vmap")  # a rule of the model's own for what a token sees
        and (local_size is None or length <= local_size or _has_windows(given.get("config")))
    ):
        return None
    if is_long(given["q_length"], length):
        return tiled.make_mask(**given)
    mask: Tensor | None = masking_utils.sdpa_mask(**given)
    return mask


for _name in (VARLEN, BY_DOCUMENT):
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, _mask)
