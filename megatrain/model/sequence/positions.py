"""What a model makes once for a row and gives to all of its layers: rotary tables, masks in numbers.

The graph of a pass holds each of them once, whoever saves it. So a layer that leaves its saved tensors to the
host leaves these where they are: to copy them for each layer would free nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def shared_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors of numbers, without gradients, that a layer is given beside its hidden states.

    A part of a larger tensor is left out, such as a layer's own part of what the embedding made for all.

    Args:
        args: The arguments by position, of which the first is the hidden states.
        kwargs: The arguments by name.
    """
    for value in (*args[1:], *kwargs.values()):
        for tensor in _tensors(value):
            if tensor.requires_grad or tensor.layout is not torch.strided or not tensor.is_floating_point():
                continue
            if tensor.numel() * tensor.dtype.itemsize == tensor.untyped_storage().nbytes():
                yield tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
