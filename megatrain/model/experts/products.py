"""The arithmetic of experts in chunks: transformers' operations on some experts.

Tokens are sorted by expert, so the rows of a chunk lie together. Each function takes tensors on any device.

Source: `grouped_mm_experts_forward` of `transformers.integrations.moe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import _grouped_linear

from megatrain.model.experts.apart import Experts


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
    """Small weights with a part for each expert in their first dimension, as `Beside` lists them."""

    @classmethod
    def of(cls, hidden: Tensor, chosen: Tensor, weights: Tensor, extras: tuple[Tensor, ...]) -> Routed:
        """Sort what a layer gives to its experts.

        Args:
            hidden: The tokens, (tokens, width).
            chosen: The experts of each token, (tokens, choices).
            weights: The weights of these, (tokens, choices).
            extras: As below.
        """
        sorted_experts, places = torch.sort(chosen.reshape(-1))
        return cls(hidden, weights.reshape(-1), places, sorted_experts, extras)

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
        numbers = self.places.to(torch.int32), self.experts.to(torch.int32)
        extras = (extra.detach() for extra in self.extras)
        return self.hidden.detach(), self.weights.detach(), *numbers, *extras

    @classmethod
    def restored(cls, saved: Sequence[Tensor]) -> Routed:
        """Return what was `saved`."""
        hidden, weights, places, experts, *extras = saved
        return cls(hidden, weights, places, experts, tuple(extras))

    def starts(self, num_experts: int) -> Tensor:
        """Return at which sorted row each expert's begin, and where those of the last end: (experts + 1,)."""
        numbers = torch.arange(num_experts + 1, device=self.experts.device, dtype=self.experts.dtype)
        return torch.searchsorted(self.experts, numbers)

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


@dataclass(frozen=True, slots=True)
class Beside:
    """What belongs to the two matrices of experts beside them: of the first, then of the second."""

    has_bias: bool
    scalings: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    """Of each matrix: the factors of the adapters, which are two small matrices for each expert."""

    @property
    def num_first(self) -> int:
        """Return how many of the extras are of the first matrix."""
        return self.has_bias + 2 * len(self.scalings[0])

    def adapted(self, place: int, weight: Tensor, extras: Sequence[Tensor]) -> Tensor:
        """Return a matrix of the experts with what its adapters add."""
        pairs = extras[self.has_bias :]
        for scaling, left, right in zip(self.scalings[place], pairs[::2], pairs[1::2], strict=True):
            with torch.autocast(weight.device.type, enabled=False):
                weight = torch.baddbmm(weight, left, right, alpha=scaling)
        return weight


def first_product(experts: Experts, beside: Beside, rows: ChunkRows, weight: Tensor) -> Tensor:
    """Return what flows between the two products of a chunk, (rows, inner width)."""
    module: Any = experts.module
    out = _product(experts, beside, 0, rows, rows.hidden, weight, rows.extras[: beside.num_first])
    found: Tensor = module._apply_gate(out) if module.has_gate else module.act_fn(out)
    return found


def second_product(
    experts: Experts, beside: Beside, rows: ChunkRows, inner: Tensor, weight: Tensor
) -> Tensor:
    """Return the weighted results of a chunk, (rows, width)."""
    out = _product(experts, beside, 1, rows, inner, weight, rows.extras[beside.num_first :])
    return out * rows.weights.unsqueeze(-1)


def _product(
    experts: Experts,
    beside: Beside,
    place: int,
    rows: ChunkRows,
    inputs: Tensor,
    weight: Tensor,
    extras: Sequence[Tensor],
) -> Tensor:
    bias = extras[0][rows.local] if beside.has_bias else None
    weight = beside.adapted(place, weight, extras)
    transposed = experts.module.is_transposed
    found: Tensor = _grouped_linear(inputs, weight, rows.offsets, bias=bias, is_transposed=transposed)
    return found


Factors = tuple[Tensor, Tensor, float]
"""An adapter of a matrix of experts: two small matrices for each expert, and a factor."""


def beside_of(
    experts: Experts, adapters: Mapping[str, Sequence[Factors]]
) -> tuple[Beside, tuple[Tensor, ...]]:
    """Find what is beside the matrices of experts, as their module finds it.

    Args:
        experts: The experts.
        adapters: The adapters of each matrix, by its name.
    """
    module: Any = experts.module
    extras: list[Tensor] = []
    for leaf in experts.matrices:
        extras += [getattr(module, f"{leaf}_bias")] if module.has_bias else []
        extras += [part for left, right, _ in adapters.get(leaf, ()) for part in (left, right)]
    first, second = (tuple(factors[2] for factors in adapters.get(leaf, ())) for leaf in experts.matrices)
    return Beside(module.has_bias, (first, second)), tuple(extras)
