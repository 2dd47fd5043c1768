"""The autograd function that streams weights: views of them go out, gradients come in.

Forward hands out tensors that share a place's memory; the model computes with them in place of its
parameters. Backward receives their gradients. Its node is made first in a block, so it
has the block's lowest sequence number and autograd runs it last of all the block's nodes: its backward is
where the block's gradient is complete and its slot is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Collect = Callable[[Sequence[Tensor | None]], None]


with torch.inference_mode(False):
    ANCHOR = torch.zeros((), requires_grad=True)
    HEAD_ANCHOR = torch.zeros((), requires_grad=True)
"""They make autograd take note of the function, and get no gradient. The second is of the weights that head
and loss use: a backward that ends with these runs as far as there."""


class _StreamWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, collect: Collect, aliases: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.collect = collect
        ctx.set_materialize_grads(False)
        return tuple(map(Tensor.detach, aliases))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        if torch.is_grad_enabled():  # create_graph=True: nothing goes on from what is taken here
            with torch.no_grad():
                ctx.collect(grads)
        else:
            ctx.collect(grads)
        return None, None, None


_apply = super(torch.autograd.Function, _StreamWeights).apply
"""`Function.apply` without its search for functorch's transforms, under which nothing streams."""


def stream_weights(
    aliases: Sequence[Tensor], trained: Sequence[bool], collect: Collect, *, anchor: Tensor = ANCHOR
) -> list[Tensor]:
    """Return one tensor per alias to compute with; gradients of the trained ones go to `collect`.

    Args:
        aliases: Tensors that share the device memory of a block's parameters.
        trained: The bools, one per alias, that say whether it wants a gradient now.
        collect: The function that is called once in the backward, last of the block, with one gradient or
            None per trained alias.
        anchor: The tensor that makes autograd take note: `HEAD_ANCHOR` where the aliases are used behind the
            last layer. What another anchor was made of has its backward after theirs.
    """
    if True not in trained:
        return list(map(Tensor.detach, aliases))
    if not torch.is_grad_enabled():  # as parameters: torch.matmul takes its kernel by whether they want one
        return [a.detach().requires_grad_(t) for a, t in zip(aliases, trained, strict=True)]
    if False not in trained:
        return list(_apply(anchor, collect, aliases))
    streamed = iter(_apply(anchor, collect, [a for a, t in zip(aliases, trained, strict=True) if t]))
    return [next(streamed) if t else a.detach() for a, t in zip(aliases, trained, strict=True)]


class SavedWeight(NamedTuple):
    """A saved tensor that is part of a block's weights: where, instead of the bytes."""

    entry: int
    """Number of the fragment's entry in the visit."""
    element_offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, place: Tensor, entry: int) -> SavedWeight:
        """Describe a tensor that lies in a block's place."""
        dtype = tensor.dtype
        offset = tensor.storage_offset() - place.storage_offset() // dtype.itemsize
        # in C, as the class's own constructor does it: layers save dozens
        return tuple.__new__(cls, (entry, offset, dtype, tensor.shape, tensor.stride()))

    def found(self, place: Tensor) -> Tensor:
        """Return the tensor, where the block is now."""
        _, offset, dtype, shape, stride = self
        tensor = torch.empty(0, dtype=dtype, device=place.device)
        return tensor.set_(
            place.untyped_storage(), place.storage_offset() // dtype.itemsize + offset, shape, stride
        )
