"""torch's variable-length flash attention for the CPU: exact arithmetic under aten's own names.

With it the real `torch.nn.attention.varlen.varlen_attn` runs, and its autograd. Scores are made anew in the
backward, from the log-sum-exp that the forward keeps, as flash attention does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

calls = {"forward": 0, "backward": 0}


def _stretches(starts: Tensor) -> Iterator[slice]:
    places = starts.tolist()
    assert places == sorted(places)
    assert starts.dtype is torch.int32
    return (slice(*pair) for pair in pairwise(places) if pair[0] < pair[1])


def _weights(query: Tensor, key: Tensor, is_causal: bool, given: dict[str, Any]) -> Any:
    """Return scores (heads, T, T) in fp32, with keys for every head, and the scale."""
    scale, left = given["scale"], given["window_size_left"]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    assert is_causal or given["window_size_right"] == 0
    key = key.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    behind = torch.arange(len(query))[:, None] - torch.arange(len(query))
    window = len(query) if left in (None, -1) else left
    return scores.masked_fill((behind < 0) | (behind > window), -torch.inf), key, scale


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    starts_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    **given: Any,
) -> tuple[Tensor, ...]:
    calls["forward"] += 1
    assert torch.equal(starts, starts_k)
    assert max_q == max_k >= int(starts.diff().max())
    assert int(starts[-1]) == len(query)
    assert dropout == 0
    output = torch.full_like(query, torch.nan)
    sums = torch.full((query.shape[1], len(query)), torch.nan)
    for part in _stretches(starts):
        scores, _, _ = _weights(query[part], key[part], is_causal, given)
        sums[:, part] = scores.logsumexp(-1)
        values = value[part].float().repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        chances = (scores - sums[:, part, None]).exp()
        output[part] = torch.einsum("hqk,khd->qhd", chances, values).to(query.dtype)
    empty = torch.empty(0)
    return output, sums, torch.zeros(2, dtype=torch.uint64), empty, empty


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    starts_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    **given: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    calls["backward"] += 1
    made = [torch.full_like(each, torch.nan) for each in (query, key, value)]
    for part in _stretches(starts):
        scores, keys, scale = _weights(query[part], key[part], is_causal, given)
        groups = query.shape[1] // key.shape[1]
        values = value[part].float().repeat_interleave(groups, dim=1)
        chances = (scores - sums[:, part, None]).exp()
        of_out, output = grad[part].float(), out[part].float()
        of_chances = torch.einsum("qhd,khd->hqk", of_out, values) - (of_out * output).sum(-1).T[..., None]
        of_scores = chances * of_chances * scale
        of_key = torch.einsum("hqk,qhd->khd", of_scores, query[part].float())
        of_value = torch.einsum("hqk,qhd->khd", chances, of_out)
        made[0][part] = torch.einsum("hqk,khd->qhd", of_scores, keys).to(query.dtype)
        for target, of_heads in zip(made[1:], (of_key, of_value), strict=True):
            target[part] = of_heads.unflatten(1, (-1, groups)).sum(2).to(target.dtype)
    return made[0], made[1], made[2]


@contextmanager
def flash_on_cpu() -> Iterator[dict[str, int]]:
    """Let the CPU have the kernels inside; the result counts their calls."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    calls.update(forward=0, backward=0)
    try:
        yield calls
    finally:
        library._destroy()
