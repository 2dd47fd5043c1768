"""What of a decoder's output leads to the loss beside the last hidden states: what routers choose by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class Others:
    """The tensors of a decoder's output, beside the last hidden states, from which gradients lead on."""

    def __init__(self, output: Any) -> None:
        """Find them in the fields of `output`."""
        held = {name: value for name, value in output.items() if name != "last_hidden_state"}
        self._leaves, self._tree = tree_flatten(held)
        self._places = [
            place
            for place, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        self._output = output

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors."""
        return [self._leaves[place] for place in self._places]

    def fields(self, given: Sequence[Tensor]) -> dict[str, Any]:
        """Return the fields with tensors in place of these."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, given, strict=True):
            leaves[place] = tensor
        fields: dict[str, Any] = tree_unflatten(leaves, self._tree)
        return fields


def leads_to(tensors: Sequence[Tensor], loss_of: Callable[[], Tensor]) -> bool:
    """Return whether a loss depends on any of these."""
    if not tensors:
        return False
    with torch.enable_grad():
        loss = loss_of()
    if not loss.requires_grad:
        return False
    return any(grad is not None for grad in torch.autograd.grad(loss, tensors, allow_unused=True))
