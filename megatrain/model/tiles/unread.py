"""Runs of which nobody reads what comes before some point: nothing is computed until then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten


class Unread(TorchDispatchMode):
    """Computes nothing, since nobody reads it, until `end` is called: results have their shapes alone.

    Views, and operations on anything but floating-point numbers, are as always: what a module does may depend
    on them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_on = True

    def end(self) -> None:
        """Compute from now on."""
        self._is_on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._shaped(func, args, kwargs) if self._is_on else None
        return func(*args, **kwargs) if result is None else result

    def _shaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return a result of the right shape, whose values are any; None: it has to be computed."""
        if not isinstance(func, torch._ops.OpOverload) or func.is_view or func._schema.is_mutable:
            return None
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or not all(tensor.is_floating_point() for tensor in tensors):
            return None
        place = tensors[0].device
        given = tuple(_Like.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        try:
            key = (func, tree, given)
            if key not in _shapes:
                _shapes[key] = _result_of(func, given, tree)
        except TypeError:  # a list or another thing that is no key
            return None
        like = _shapes[key]
        if like is None:
            return None
        return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=place)


@dataclass(frozen=True, slots=True)
class _Like:
    """What a tensor looks like, without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Like:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)


_shapes: dict[Any, _Like | None] = {}


def _result_of(func: Any, given: Sequence[Any], tree: Any) -> _Like | None:
    """Return what an operation returns; None: several tensors, none of numbers, or it cannot be told."""
    with torch._C._DisableTorchDispatch():  # no mode is told of it: nothing is computed
        leaves = [
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
            if isinstance(leaf, _Like)
            else leaf
            for leaf in given
        ]
        args, kwargs = tree_unflatten(leaves, tree)
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            return None
    return _Like.of(result) if isinstance(result, Tensor) and result.is_floating_point() else None
