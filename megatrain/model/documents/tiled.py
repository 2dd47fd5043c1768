"""The attention function `tiled` of transformers, and what stands for its masks.

Where scaled dot product attention needs no mask and the device has a kernel that makes no scores, it attends.
All else goes by tiles: windows, chunks, packed and padded rows, soft caps, sinks, heads whose keys and values
differ in size where no kernel takes them. A mask is made, and used by scaled dot product attention, only for
a rule that nothing but a mask says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from megatrain.config.attention import TILED
from megatrain.errors import ModelError
from megatrain.model.documents.sight import Sight, sight_of
from megatrain.model.kernels import is_accelerator_imitated, spares_scores
from megatrain.model.tiled_attention import operation

_TOKENS = 64
"""The tokens of a call that asks which kernel torch takes."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Sight | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attend by tiles, or as `sdpa` where that needs no mask and no matrix of scores.

    Args:
        module: The module of the attention.
        query: The queries, (B, heads, T, D).
        key: The keys, (B, key heads, S, D).
        value: The values, (B, key heads, S, E).
        attention_mask: What tokens see; None: all that is before them, or all if the module is not causal.
        given: What else the model passes on.

    Returns:
        (B, T, heads, E); no weights.

    Raises:
        ModelError: A layer wants something that neither of the two does.
    """
    changes_scores = given.get("softcap") is not None or given.get("s_aux") is not None
    if isinstance(attention_mask, Sight):
        return _by_tiles(module, query, key, value, attention_mask, True, given)
    is_causal = given.get("is_causal")
    is_causal = query.shape[2] > 1 and (
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    )
    if attention_mask is not None and changes_scores:
        raise ModelError(
            f"attention by tiles ({TILED}) takes no mask of pairs beside a soft cap or sinks, and a layer of "
            f"{type(module).__name__} gives it one; use model.attn_implementation=eager"
        )
    is_plain = attention_mask is None and not given.get("dropout") and given.get("position_bias") is None
    if changes_scores or (is_plain and not _has_kernel(query, key, value)):
        return _by_tiles(module, query, key, value, Sight(None), bool(is_causal), given)
    found: tuple[Tensor, None] = AttentionInterface()["sdpa"](
        module, query, key, value, attention_mask, **given
    )
    return found


def _by_tiles(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    is_causal: bool,
    given: dict[str, Any],
) -> tuple[Tensor, None]:
    wanted = {"dropout": bool(given.get("dropout")), "biases": given.get("position_bias") is not None}
    for what, is_wanted in wanted.items():
        if is_wanted:
            raise ModelError(
                f"attention by tiles ({TILED}) has no {what}, which {type(module).__name__} asks for"
            )
    scale = given.get("scaling")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (each.to(dtype) for each in (query, key, value))
    output, _ = operation.attend(
        query,
        key,
        value,
        given.get("s_aux"),
        sight.starts,
        sight.present,
        query.shape[-1] ** -0.5 if scale is None else scale,
        given.get("softcap"),
        sight.window,
        is_causal,
    )
    return output, None


def _kernel_of(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int], wants: bool
) -> bool:
    """Whether torch has a kernel without a matrix of scores for heads of these numbers and sizes."""
    if is_accelerator_imitated():
        return True
    with _disable_current_modes():
        query, key, value = (
            torch.empty(1, number, _TOKENS, size, device=device, dtype=dtype, requires_grad=wants)
            for number, size in ((heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]))
        )
        return bool(spares_scores(query, key, value))


# what torch._dynamo.assume_constant_result does, which would load the compiler
_kernel_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    sizes = query.shape[-1], value.shape[-1]
    heads = query.shape[1], key.shape[1] if sizes[0] == sizes[1] else query.shape[1]
    return _kernel_of(query.device, query.dtype, heads, sizes, query.requires_grad)


def make_mask(**given: Any) -> Tensor | Sight | None:
    """Say what tokens see, or make the mask that says it; None: they see all before them."""
    sight = sight_of(given)
    if sight is None:
        mask: Tensor | None = masking_utils.sdpa_mask(**given)
        return mask
    is_plain = sight.window is None and sight.starts is None and sight.present is None
    return None if is_plain and given["q_length"] in (1, given["kv_length"]) else sight


AttentionInterface.register(TILED, attend)
AttentionMaskInterface.register(TILED, make_mask)
