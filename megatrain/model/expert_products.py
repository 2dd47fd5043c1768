"""The arithmetic of experts in chunks: transformers' operations on some experts.

Tokens are sorted by expert, so the rows of a chunk lie together. Each function takes tensors on any device.

Source: `grouped_mm_experts_forward` of `transformers.integrations.moe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import _grouped_linear

from megatrain.model.experts import Experts


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens with the experts that a router has chosen for them, sorted by expert."""

    hidden: Tensor
    """What flows into the experts, (tokens, width)."""
    weights: Tensor
    """The weight of each choice, (tokens * choices,), token by token."""
    places: Tensor
    """The place of each sorted row among the choices, (tokens * choices,) integers."""
    experts: Tensor
    """The expert of each sorted row, likewise."""
    extras: tuple[Tensor, ...]
    """Small weights with a part for each expert in their first dimension: biases of the two products."""

    @classmethod
    def of(cls, experts: Experts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Routed:
        """Sort what a layer gives to its experts.

        Args:
            experts: The experts, whose module finds its biases.
            hidden: The tokens, (tokens, width).
            chosen: The experts of each token, (tokens, choices).
            weights: The weights of these, (tokens, choices).
        """
        sorted_experts, places = torch.sort(chosen.reshape(-1))
        return cls(hidden, weights.reshape(-1), places, sorted_experts, biases_of(experts))

    @property
    def num_choices(self) -> int:
        """Return the number of experts of a token."""
        return len(self.weights) // len(self.hidden) if len(self.hidden) else 1

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """Return the tensors that may want a gradient."""
        return self.hidden, self.weights, *self.extras

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """Return what the backward needs, to be restored by `restored`."""
        small = (extra.detach().clone() for extra in self.extras)  # their block leaves the device
        numbers = self.places.to(torch.int32), self.experts.to(torch.int32)
        return self.hidden.detach(), self.weights.detach(), *numbers, *small

    @classmethod
    def restored(cls, saved: Sequence[Tensor]) -> Routed:
        """Return what was `saved`."""
        hidden, weights, places, experts, *extras = saved
        return cls(hidden, weights, places, experts, tuple(extras))

    def bounds(self, chunks: Sequence[range]) -> list[range]:
        """Return the rows of each chunk of experts among the sorted ones. The host waits for them, once."""
        edges = torch.tensor([edge for chunk in chunks for edge in (chunk.start, chunk.stop)])
        found = torch.searchsorted(self.experts, edges.to(self.experts.device)).tolist()
        return [range(start, stop) for start, stop in zip(found[::2], found[1::2], strict=True)]

    def summed(self, weighted: Tensor) -> Tensor:
        """Sum weighted results, (tokens * choices, width), over the choices of each token."""
        by_token = weighted.view(len(self.hidden), self.num_choices, weighted.shape[-1])
        return by_token.sum(dim=1).to(self.hidden.dtype)


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows of a chunk of experts."""

    hidden: Tensor
    """(rows, width)."""
    weights: Tensor
    """(rows,)."""
    tokens: Tensor
    """The token of each row."""
    places: Tensor
    """The place of each row among the choices of all tokens."""
    offsets: Tensor
    """(experts,) int32: behind which row those of each expert end."""
    local: Tensor
    """The number of each row's expert in the chunk."""
    extras: tuple[Tensor, ...]
    """The chunk's part of `Routed.extras`."""

    @classmethod
    def of(cls, routed: Routed, experts: range, rows: range, *, wants: Sequence[bool] = ()) -> ChunkRows:
        """Take a chunk's rows.

        Args:
            routed: All rows.
            experts: The experts of the chunk.
            rows: Its rows among the sorted ones.
            wants: Which of `routed.differentiable` get a gradient: those of the chunk are leaves; none: no
                gradient is wanted.
        """
        own = slice(rows.start, rows.stop)
        places = routed.places[own].long()
        tokens = torch.div(places, routed.num_choices, rounding_mode="floor")
        local = routed.experts[own].long() - experts.start
        numbers = torch.arange(len(experts), device=local.device, dtype=local.dtype)
        offsets = torch.searchsorted(local, numbers, right=True).to(torch.int32)
        taken = [routed.hidden[tokens], routed.weights[places]]
        taken += [extra[experts.start : experts.stop] for extra in routed.extras]
        if wants:
            taken = [part.detach().requires_grad_(want) for part, want in zip(taken, wants, strict=True)]
        hidden, weights, *extras = taken
        return cls(hidden, weights, tokens, places, offsets, local, tuple(extras))


def first_product(experts: Experts, rows: ChunkRows, weight: Tensor) -> Tensor:
    """Return what flows between the two products of a chunk, (rows, inner width)."""
    module: Any = experts.module
    bias = rows.extras[0][rows.local] if module.has_bias else None
    out = _grouped_linear(rows.hidden, weight, rows.offsets, bias=bias, is_transposed=module.is_transposed)
    found: Tensor = module._apply_gate(out) if module.has_gate else module.act_fn(out)
    return found


def second_product(experts: Experts, rows: ChunkRows, inner: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted results of a chunk, (rows, width)."""
    module: Any = experts.module
    bias = rows.extras[1][rows.local] if module.has_bias else None
    out = _grouped_linear(inner, weight, rows.offsets, bias=bias, is_transposed=module.is_transposed)
    return out * rows.weights.unsqueeze(-1)


def biases_of(experts: Experts) -> tuple[Tensor, ...]:
    """Return the biases of the two products, as the module finds them; none: it has none."""
    if not experts.module.has_bias:
        return ()
    return tuple(getattr(experts.module, f"{leaf}_bias") for leaf in experts.matrices)
