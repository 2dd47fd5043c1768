"""Attention by tiles as two operations of torch: autograd, policies, counts and compilers see no more of it.

What it takes inside is a few tiles of scores, which `scratch_bytes` says, and no operation inside is seen by
anybody. Its backward needs what its forward returned, so whoever keeps that need not run it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatrain.model.tiled_attention import arithmetic
from megatrain.model.tiled_attention.arithmetic import Scores, wide
from megatrain.model.tiled_attention.tiles import View, documents

NAMESPACE = "megatrain"
_NAME = f"{NAMESPACE}::tiled_attention"
"""The operation; its backward has `_backward` behind this."""

_PASSES = 10, 19
"""How often a forward and a backward read or write each score, which torch's operations do one by one."""
_SOFTCAP_PASSES = 6, 9
"""How often beside that with a soft cap."""
_BUFFERS = 1, 2
"""Tiles of scores that are there at once; a soft cap has one more."""
_MASK_BYTES = 12
"""Memory of the masks of a tile, which all heads share, for each of its pairs of tokens: places are in int64
while one is made."""


@torch.library.custom_op(_NAME, mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    starts: Tensor | None,
    present: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attend; see `arithmetic.forward`.

    Args:
        query: (B, heads, T, D).
        key: (B, key heads, S, D).
        value: (B, key heads, S, E).
        sinks: (heads,).
        starts: The places where documents begin, on the host, in int64; see `documents`.
        present: (B, S), bool.
        scale: As of `Scores`.
        softcap: As of `Scores`.
        window: As of `View`.
        is_causal: As of `View`.

    Returns:
        (B, T, heads, E); (B, heads, T) in fp32 at least.
    """
    scores = Scores(scale, softcap, is_causal, window)
    with torch.autocast(query.device.type, enabled=False):
        return arithmetic.forward(query, key, value, sinks, _places(starts), present, scores)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return output, query.new_empty(query.shape[:3], dtype=wide(query.dtype))


@torch.library.custom_op(f"{_NAME}_backward", mutates_args=())
def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    starts: Tensor | None,
    present: Tensor | None,
    output: Tensor,
    sums: Tensor,
    gradient: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks; see `arithmetic.backward`."""
    scores = Scores(scale, softcap, is_causal, window)
    with torch.autocast(query.device.type, enabled=False):
        return arithmetic.backward(
            query, key, value, sinks, _places(starts), present, output, sums, gradient, scores
        )


@attend_backward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = query.new_empty(0, dtype=wide(query.dtype)) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_sinks


def _places(starts: Tensor | None) -> list[int] | None:
    if starts is None:
        return None
    assert starts.device.type == "cpu", "where documents begin is read on the host"
    return [int(place) for place in starts.tolist()]


def _note(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, starts, present, *ctx.settings = inputs
    ctx.starts = starts  # it stays on the host, where hooks for saved tensors need not see it
    ctx.save_for_backward(query, key, value, sinks, present, *output)
    ctx.set_materialize_grads(False)


def _go_back(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 10
    query, key, value, sinks, present, output, sums = ctx.saved_tensors
    *found, of_sinks = attend_backward(
        query, key, value, sinks, ctx.starts, present, output, sums, gradient, *ctx.settings
    )
    return *found, None if sinks is None else of_sinks, *(None,) * 6


attend.register_autograd(_go_back, setup_context=_note)


# -- what it costs -------------------------------------------------------------------------------------------


class Work:
    """What a call of the operation, or of its backward, costs."""

    def __init__(self, given: Mapping[str, Any], starts: Tensor | None, *, is_backward: bool) -> None:
        """Count a call.

        Args:
            given: Its arguments by name.
            starts: Where documents begin, a real tensor.
            is_backward: Whether it is one of the backward.
        """
        query, key, value = given["query"], given["key"], given["value"]
        (num_rows, num_heads, num_tokens, size), num_keys = query.shape, key.shape[2]
        settings = {"is_causal": given["is_causal"], "window": given["window"]}
        lengths: dict[int, int] = {}
        for each in documents(num_rows, num_keys, _places(starts)):
            length = each.end - each.begin
            lengths[length] = lengths.get(length, 0) + 1
        views = {length: View(length - num_keys + num_tokens, length, **settings) for length in lengths}
        scores = num_heads * sum(number * views[length].num_scores for length, number in lengths.items())
        widths = 3 * size + 2 * value.shape[3] if is_backward else size + value.shape[3]
        itemsize = wide(query.dtype).itemsize
        capped = _SOFTCAP_PASSES[is_backward] if given["softcap"] is not None else 0
        self.flops = 2 * scores * widths
        """The FLOPs of its products, over the tiles that it goes through."""
        self.moved_bytes = itemsize * scores * (_PASSES[is_backward] + capped)
        """The memory that it reads and writes beside them: scores, again and again."""
        longest = views[max(views)]
        group = num_heads // key.shape[1]
        together = longest.heads_at_once(key.shape[1], group)
        buffers = _BUFFERS[is_backward] + (given["softcap"] is not None)
        side = min(longest.tile, longest.num_keys)
        own = side * 3 * (size + value.shape[3])  # copies of a tile's queries, and their sums
        of_keys = (longest.num_keys if is_backward else side) * (size + value.shape[3])
        elements = group * (longest.most_scores * buffers + own) + of_keys
        self.scratch_bytes = itemsize * together * elements + _MASK_BYTES * longest.most_scores
        """The memory that it takes for itself while it runs."""
