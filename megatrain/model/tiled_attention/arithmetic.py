"""The forward and the backward of attention, tile by tile, in torch's operations.

Scores and sums are in fp32 at least, whatever dtype comes in. On NVIDIA's and AMD's devices products read
bf16 and fp16 as they are and add up in fp32, as flash attention's do (**never run on a GPU**); elsewhere
their inputs are converted.

Source: FlashAttention-2 (Dao, 2023), algorithms 1 and 2; the soft cap of Gemma 2 (2024); the sinks of
StreamingLLM (Xiao et al., 2023) as gpt-oss learns them, one score for each head that no value belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.model.tiled_attention.tiles import Document, View, documents

_HIDDEN = -1e30
"""The score of a key that a query does not see, finite: a tile in which a query sees nothing then takes part
with sums that its first key takes back to nothing, exactly."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made of queries and keys."""

    scale: float
    """The factor of their products."""
    softcap: float | None
    """The bound that scores come near to at most, by a tanh; None: there is none."""
    is_causal: bool
    window: int | None

    def of(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores of a tile, and what its backward needs: the tanh of a soft cap."""
        scores = product(query, key.transpose(-1, -2)).mul_(self.scale)
        if self.softcap is None:
            return scores, None
        bent = scores.div_(self.softcap).tanh_()
        return bent * self.softcap, bent

    def back(self, gradient: Tensor, bent: Tensor | None) -> Tensor:
        """Return the gradient of a tile's products from that of its scores, in whose place it is made."""
        if bent is not None:
            gradient.mul_(bent.square_().neg_().add_(1.0))
        return gradient.mul_(self.scale)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and sums."""
    return torch.promote_types(dtype, torch.float32)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices, (n, rows, k) and (n, k, columns), in the wide dtype."""
    dtype = wide(right.dtype)
    if right.dtype == left.dtype == dtype:
        return torch.bmm(left, right)
    if right.is_cuda:
        narrow = right.dtype if right.dtype != dtype else left.dtype
        return torch.bmm(left.to(narrow), right.to(narrow), out_dtype=dtype)
    return torch.bmm(left.to(dtype), right.to(dtype))


class _Part:
    """Some heads of one document: queries of (heads of keys, queries of each, tokens, size)."""

    def __init__(
        self,
        document: Document,
        heads: slice,
        view: View,
        num_queries_per_key: int,
        present: Tensor | None,
    ) -> None:
        self.document, self.view = document, view
        self.of_keys = heads
        self.number = heads.stop - heads.start
        self._group = num_queries_per_key
        self.of_queries = slice(heads.start * self._group, heads.stop * self._group)
        self._present = None if present is None else present[document.row, document.tokens]
        self._hidden: dict[tuple[int, int, int], Tensor] = {}

    def queries(self, whole: Tensor, tile: slice) -> Tensor:
        """Cut a tile's queries out of (rows, heads, tokens, ...), one below the other: (n, queries, ...)."""
        begin = self.document.begin
        cut = whole[self.document.row, self.of_queries, begin + tile.start : begin + tile.stop]
        return cut.reshape(self.number, -1, *cut.shape[2:])

    def put_queries(self, whole: Tensor, tile: slice, values: Tensor) -> None:
        """Put what `queries` would cut out into its place."""
        begin = self.document.begin
        room = whole[self.document.row, self.of_queries, begin + tile.start : begin + tile.stop]
        room.copy_(values.view(room.shape))

    def keys(self, whole: Tensor, tile: slice) -> Tensor:
        """Cut a tile's keys, or values, out of (rows, heads, tokens, size): (n, keys, size)."""
        begin = self.document.begin
        return whole[self.document.row, self.of_keys, begin + tile.start : begin + tile.stop]

    def put_keys(self, whole: Tensor, values: Tensor) -> None:
        """Put those of all keys into their place."""
        whole[self.document.row, self.of_keys, self.document.tokens] = values.to(whole.dtype)

    def hide(self, scores: Tensor, queries: slice, keys: slice, fill: float) -> None:
        """Fill in what is there of keys that queries do not see, in (n, queries, keys)."""
        by_head = scores.view(self.number, self._group, -1, scores.shape[-1])
        if not self.view.is_whole(queries, keys):
            by_head.masked_fill_(self._is_hidden(queries, keys, scores.device), fill)
        if self._present is not None:
            by_head.masked_fill_(~self._present[keys], fill)

    def _is_hidden(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """Return which keys are hidden, (queries, keys); tiles that are placed alike share it."""
        ahead = queries.start + self.view.shift - keys.start
        named = ahead, queries.stop - queries.start, keys.stop - keys.start
        if named not in self._hidden:
            places = torch.arange(ahead, ahead + named[1], device=device)
            behind = places[:, None] - torch.arange(named[2], device=device)
            hidden = behind < 0
            if self.view.window is not None:
                hidden |= behind >= self.view.window
            self._hidden[named] = hidden
        return self._hidden[named]

    def per_query(self, by_head: Tensor, tile: slice) -> Tensor:
        """Return a value for each head of queries, (heads,), for each query of a tile: (n, queries, 1)."""
        number = tile.stop - tile.start
        of_group = by_head[self.of_queries].view(self.number, self._group, 1)
        return of_group.expand(-1, -1, number).reshape(self.number, -1, 1)


def _parts(
    query: Tensor, key: Tensor, scores: Scores, starts: Sequence[int] | None, present: Tensor | None
) -> Iterator[_Part]:
    """Yield heads and documents, in the order in which they are gone through."""
    num_rows, num_heads, num_tokens, _ = query.shape
    num_key_heads, num_keys = key.shape[1:3]
    group = num_heads // num_key_heads
    assert num_heads == group * num_key_heads, "heads of queries share heads of keys evenly"
    assert scores.is_causal or scores.window is None, "windows reach back"
    for document in documents(num_rows, num_keys, starts):
        length = document.end - document.begin
        view = View(
            length - (num_keys - num_tokens), length, is_causal=scores.is_causal, window=scores.window
        )
        together = view.heads_at_once(num_key_heads, group)
        for first in range(0, num_key_heads, together):
            heads = slice(first, min(first + together, num_key_heads))
            yield _Part(document, heads, view, group, present)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    starts: Sequence[int] | None,
    present: Tensor | None,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Attend.

    Args:
        query: (B, heads, T, D).
        key: (B, key heads, S, D). The queries are those of the last T tokens.
        value: (B, key heads, S, E).
        sinks: (heads,); None: there are none.
        starts: The places where documents begin, as `documents` takes them; S is T then.
        present: (B, S), which tokens are there; None: all.
        scores: How scores are made.

    Returns:
        (B, T, heads, E) in the dtype of `value`; the log-sum-exp of each query's scores, the sink among
        them, (B, heads, T), in fp32 at least.
    """
    dtype = wide(query.dtype)
    output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    by_head = output.transpose(1, 2)
    sums = query.new_empty(query.shape[:3], dtype=dtype)
    for part in _parts(query, key, scores, starts, present):
        for tile in part.view.queries():
            own = part.queries(query, tile)
            found = own.new_zeros(*own.shape[:2], value.shape[3], dtype=dtype)
            if sinks is None:
                most = own.new_full((*own.shape[:2], 1), _HIDDEN, dtype=dtype)
                total = torch.zeros_like(most)
            else:
                most = part.per_query(sinks.to(dtype), tile)
                total = torch.ones_like(most)
            for keys in part.view.keys(tile):
                weights = scores.of(own, part.keys(key, keys))[0]
                part.hide(weights, tile, keys, _HIDDEN)
                before, most = most, torch.maximum(most, weights.amax(-1, keepdim=True))
                weights.sub_(most).exp_()
                kept = (before - most).exp_()
                total.mul_(kept).add_(weights.sum(-1, keepdim=True))
                found.mul_(kept).add_(product(weights, part.keys(value, keys)))
                del weights
            part.put_queries(by_head, tile, found.div_(total))
            part.put_queries(sums, tile, total.log_().add_(most).squeeze(-1))
    return output, sums


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    starts: Sequence[int] | None,
    present: Tensor | None,
    output: Tensor,
    sums: Tensor,
    gradient: Tensor,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks (empty without sinks).

    Args:
        query: As of `forward`.
        key: As of `forward`.
        value: As of `forward`.
        sinks: As of `forward`.
        starts: As of `forward`.
        present: As of `forward`.
        output: What `forward` returned.
        sums: The log-sum-exp that it returned.
        gradient: That of the output, in its form.
        scores: As of `forward`.
    """
    dtype = wide(query.dtype)
    of_query, of_key, of_value = (torch.empty_like(each) for each in (query, key, value))
    of_sinks = query.new_zeros(0 if sinks is None else len(sinks), dtype=dtype)
    gradient, output = gradient.transpose(1, 2), output.transpose(1, 2)
    for part in _parts(query, key, scores, starts, present):
        every = slice(0, part.view.num_keys)
        sum_of_key, sum_of_value = (
            torch.zeros_like(part.keys(each, every), dtype=dtype, memory_format=torch.contiguous_format)
            for each in (key, value)
        )
        for tile in part.view.queries():
            own, of_output = part.queries(query, tile), part.queries(gradient, tile)
            total = part.queries(sums, tile).unsqueeze(-1)
            # the sum over keys of weights and their gradients
            common = (of_output.to(dtype) * part.queries(output, tile)).sum(-1, keepdim=True)
            if sinks is not None:
                lost = (part.per_query(sinks.to(dtype), tile) - total).exp_().mul_(common)
                of_sinks[part.of_queries] -= lost.view(part.of_queries.stop - part.of_queries.start, -1).sum(
                    1
                )
            of_own = torch.zeros_like(own, dtype=dtype)
            for keys in part.view.keys(tile):
                own_keys = part.keys(key, keys)
                weights, bent = scores.of(own, own_keys)
                weights.sub_(total).exp_()
                part.hide(weights, tile, keys, 0.0)
                sum_of_value[:, keys] += product(weights.transpose(-1, -2), of_output)
                of_scores = product(of_output, part.keys(value, keys).transpose(-1, -2))
                of_scores = scores.back(of_scores.sub_(common).mul_(weights), bent)
                del weights, bent
                of_own += product(of_scores, own_keys)
                sum_of_key[:, keys] += product(of_scores.transpose(-1, -2), own)
                del of_scores
            part.put_queries(of_query, tile, of_own)
        part.put_keys(of_key, sum_of_key)
        part.put_keys(of_value, sum_of_value)
    return of_query, of_key, of_value, of_sinks if sinks is None else of_sinks.to(sinks.dtype)
