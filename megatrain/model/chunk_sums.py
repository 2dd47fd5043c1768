"""The gradient of weights that a head in chunks shares with others, such as a tied embedding.

Each chunk makes a gradient of the whole weight. They add up in fp32, and leave the head as one, in the dtype
of the weight, as that of a head that runs whole does: autograd adds it to what else comes to the weight in
the same micro-batch. So the gradients of micro-batches add up in one order, in lockstep or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Whole(torch.autograd.Function):
    """Hands on to weights what chunks have added up, once all of them have."""

    @staticmethod
    def forward(ctx: Any, sums: list[Tensor | None], *weights: Tensor) -> Tensor:
        ctx.sums, ctx.dtypes = sums, [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        found = [
            held if held is None else held.to(dtype) for held, dtype in zip(ctx.sums, ctx.dtypes, strict=True)
        ]
        ctx.sums[:] = [None] * len(found)
        return (None, *found)


class ChunkSums:
    """Sums of one head's gradients of some weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """Begin without any; `weights` want a gradient."""
        self._sums: list[Tensor | None] = [None] * len(weights)
        self.token: Tensor = _Whole.apply(self._sums, *weights)
        """The tensor from which the graph makes a chunk's weights, so that their gradients come first."""

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of a chunk, in order of the weights."""
        for place, grad in enumerate(grads):
            held = self._sums[place]
            if held is not None and grad is not None:
                held.add_(grad)
            elif grad is not None:
                self._sums[place] = grad.to(torch.float32, copy=True)
