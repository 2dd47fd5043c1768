"""Which kernel torch attends by, and attention as an accelerator runs it where the CPU has no such kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

_sdpa = torch.nn.functional.scaled_dot_product_attention


@contextmanager
def accelerator_attention() -> Iterator[None]:
    """Replace scaled dot product attention with dropout, or with values of another size than keys.

    torch's CPU kernel does neither and falls back to whole matrices; an accelerator's flash attention has
    dropout, and its memory-efficient one has values of any size. Real tensors are left to torch.
    """
    # a function mode would do, but makes every operation several times slower
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend):
        yield


def spares_scores(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float = 0.0, scale: float | None = None
) -> bool | None:
    """Whether torch's causal attention takes a kernel that makes no matrix of scores, by default.

    None: it is a device that takes no part in this choice.
    """
    try:
        choice = torch._fused_sdp_choice(
            query, key, value, None, dropout, True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    except RuntimeError:
        return None
    return bool(choice != SDPBackend.MATH.value)


def is_accelerator_imitated() -> bool:
    """Whether attention is that of an accelerator here."""
    return torch.nn.functional.scaled_dot_product_attention is _attend


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    is_square = query.shape[-1] == value.shape[-1]
    if not isinstance(query, FakeTensor) or (dropout_p == 0.0 and is_square):
        inputs = query, key, value, attn_mask
        return _sdpa(*inputs, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None and is_square:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return output
    if key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    output = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    return output
