"""Refuses tensors with a value for each pair of a long row's tokens, whatever operation makes them.

Masks that transformers makes, scores that become weights, and masks of attention kernels are seen where they
are (`megatrain/model/masks.py`, `Meter`). Biases of positions, scores that choose which tokens are attended
to, and matrices of decay come from a model's own code, where nothing but their shape tells what they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from megatrain.model.masks import LongAttentionError, is_long

_MOST_POOLED = 64
"""A dimension may be one of tokens that are taken together, so many at most."""


class TokenPairs:
    """The dimensions by which such a tensor is known, for a model and one row of tokens."""

    def __init__(self, num_tokens: Collection[int], sizes: Collection[int]) -> None:
        """Take note of what runs.

        Args:
            num_tokens: The tokens of the row that runs, and of a rank's part of it.
            sizes: The sizes of the model, of which none is one of these.
        """
        self._sizes = frozenset(sizes)
        self._least = min(num_tokens) // _MOST_POOLED

    def check(self, made: Iterable[Tensor]) -> None:
        """Refuse them.

        Raises:
            LongAttentionError: A tensor has two dimensions of tokens, and is too large.
        """
        for tensor in made:
            if not is_long(tensor.numel(), 1):
                continue
            of_tokens = (size for size in tensor.shape if size >= self._least and size not in self._sizes)
            few, many = sorted((0, 0, *of_tokens))[-2:]
            if is_long(many, few):
                raise LongAttentionError(many, few)
