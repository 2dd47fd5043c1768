"""What attention's operations return: noted in the forward, and handed out in the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatrain.model.selective import is_attention


class Noting(TorchDispatchMode):
    """Takes note of what attention returns."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if is_attention(func):
            self.outputs.append(tree_map(_detached, output))
        return output


class Giving(TorchDispatchMode):
    """Hands out what attention has returned, in order, in place of running it."""

    supports_higher_order_operators = True

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self._outputs = outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._outputs and is_attention(func):
            return self._outputs.pop(0)
        return func(*args, **(kwargs or {}))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor in the memory of what the attention function returned."""

    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Own:
    """A tensor with memory of its own."""

    number: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the outputs of one group's operations of attention are made of tensors that are kept once."""

    leaves: list[Any]
    tree: Any

    @classmethod
    def of(cls, attended: Tensor, outputs: list[Any]) -> tuple[Recipe, list[Tensor]]:
        """Take outputs apart, and return the tensors that are not views of what the function returned."""
        leaves, tree = tree_flatten(outputs)
        tensors: list[Tensor] = []
        fills = attended.is_contiguous() and attended.untyped_storage().nbytes() == attended.nbytes
        for n, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            is_there = leaf.untyped_storage()._cdata == attended.untyped_storage()._cdata
            if fills and is_there and leaf.numel() == attended.numel() and leaf.dtype == attended.dtype:
                leaves[n] = _View(leaf.shape, leaf.stride())
            else:
                leaves[n] = _Own(len(tensors))
                tensors.append(leaf)
        return cls(leaves, tree), tensors

    @property
    def number(self) -> int:
        """Return the number of tensors with memory of their own."""
        return sum(isinstance(leaf, _Own) for leaf in self.leaves)

    def outputs(self, attended: Tensor, tensors: list[Tensor]) -> list[Any]:
        """Return the outputs again."""

        def made(leaf: Any) -> Any:
            if isinstance(leaf, _View):
                return attended.as_strided(leaf.size, leaf.stride).detach()
            return tensors[leaf.number].detach() if isinstance(leaf, _Own) else leaf

        outputs: list[Any] = tree_unflatten([made(leaf) for leaf in self.leaves], self.tree)
        return outputs
