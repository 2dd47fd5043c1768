"""A row's tokens in equal, contiguous shards: who has the others, and how tensors change hands.

Outside attention everything of a layer is position by position, so each shard is computed where it is.
Inside, tokens and heads change places: who had 1/S of the tokens with all heads has all tokens with 1/S of
the heads.

Source: DeepSpeed Ulysses (Jacobs et al., 2023), https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Shards(Protocol):
    """The ranks that hold the tokens of the same rows."""

    @property
    def number(self) -> int:
        """How many they are."""

    @property
    def index(self) -> int:
        """Which part of the tokens this one has."""

    def swap(self, parts: Tensor) -> Tensor:
        """Give part n of a (number, ...) tensor to the n-th; return what all gave this one, in order."""


class Folded:
    """Shards that are the rows of one batch, so a single process is all of them: to see what they compute."""

    index = 0

    def __init__(self, number: int) -> None:
        """Expect batches of so many rows, which are shards of one."""
        self.number = number

    def swap(self, parts: Tensor) -> Tensor:
        """Swap between the rows."""
        return parts.transpose(0, 1).contiguous()


class Counted:
    """One shard whose others are not there: what it computes has the right shapes, and not the values."""

    index = 0

    def __init__(self, number: int) -> None:
        """Stand for one of so many."""
        self.number = number

    def swap(self, parts: Tensor) -> Tensor:
        """Return as much as others would give."""
        return parts.clone()


class _Swap(torch.autograd.Function):
    """An exchange after which another dimension is whole; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, shards: Shards, split: int, join: int) -> Tensor:
        ctx.shards, ctx.dims = shards, (split, join)
        return _swapped(mine, shards, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split, join = ctx.dims
        return _swapped(grad, ctx.shards, join, split), None, None, None


def swap(mine: Tensor, shards: Shards, *, split: int, join: int) -> Tensor:
    """Give every shard its part of one dimension, and join what they give along another.

    Args:
        mine: The tensor, whole along `split` and this shard's part along `join`.
        shards: The shards that take part.
        split: The dimension that is cut; its size is a multiple of the number of shards.
        join: The dimension that becomes whole.
    """
    return _Swap.apply(mine, shards, split, join)


def gather(mine: Tensor, shards: Shards) -> Tensor:
    """Return (B, T) of which each shard has (B, T / number): positions, masks."""
    found = shards.swap(mine.expand(shards.number, *mine.shape).contiguous())
    return found.movedim(0, -2).flatten(-2)


def _swapped(mine: Tensor, shards: Shards, split: int, join: int) -> Tensor:
    parts = mine.unflatten(split, (shards.number, -1)).movedim(split, 0).contiguous()
    return shards.swap(parts).movedim(0, join).flatten(join, join + 1)
