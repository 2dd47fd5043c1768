"""Calls of a layer: which are alike to a compiler, and how to try one out without a trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from megatrain.model.experts.routes import unnoticed
from megatrain.model.places import swapped
from megatrain.model.selective import kept_by_none
from megatrain.stream.forward.structure import Template


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Leave out caches that a training forward only fills; None if a cache is in use.

    In training nobody reads a cache that was empty when the forward began.
    """
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    if not caches:
        return args, kwargs
    if not torch.is_grad_enabled() or not all(map(_is_fresh, caches)):
        return None
    return (
        tuple(None if isinstance(value, Cache) else value for value in args),
        {key: None if isinstance(value, Cache) else value for key, value in kwargs.items()},
    )


def _is_fresh(cache: Cache) -> bool:
    """Whether nothing was written to a cache; one of fixed size is not fresh, since masks fit its size."""
    return type(cache) is DynamicCache and not any(
        getattr(layer, "keys", None) is not None or any(getattr(layer, "has_previous_state", {}).values())
        for layer in cache.layers
    )


def state_of(tensors: list[Any]) -> Hashable:
    """What a compiled function depends on besides its arguments."""
    device = tensors[0].device.type if tensors else "cpu"
    is_autocast = torch.is_autocast_enabled(device)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(device) if is_autocast else None,
        tuple((type(tensor), tensor.requires_grad) for tensor in tensors),
    )


def kind_of(value: Any) -> Any:
    """What a compiled function depends on in an argument; of objects only the class, dynamo does the rest."""
    if isinstance(value, Tensor):
        return (type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(kind_of, value))
    if isinstance(value, dict):
        return (dict, *((key, kind_of(item)) for key, item in value.items()))
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value), value)
    return type(value)


@contextmanager
def aside(
    template: Template, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Give inputs for a call without a trace: nothing saved, nothing drawn or chosen, no input changed."""
    tensors: list[Any] = [held[name] for held, name in template.places]
    accelerators = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    pairs = zip(tensors, template.is_buffer, strict=True)
    put = {id(tensor): _put_aside(tensor, is_buffer) for tensor, is_buffer in pairs}  # tied ones stay tied
    with (
        torch.random.fork_rng(devices=accelerators),
        unnoticed(),
        kept_by_none(),
        torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is),
        swapped(template.places, [put[id(tensor)] for tensor in tensors]),
    ):
        yield _apart(args), _apart(kwargs)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _put_aside(tensor: Tensor, is_buffer: bool) -> Tensor:
    """Copy a buffer; let a weight's gradient end in a tensor of its own, short of the streamed one."""
    if is_buffer:
        return _apart(tensor)
    if not tensor.requires_grad:
        return tensor
    own = tensor.detach()
    return nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own.requires_grad_()


def _apart(value: Any) -> Any:
    """Copy what a forward could write to, with the same strides; lists and dicts are new ones."""
    if isinstance(value, Tensor):
        is_copied = value.is_contiguous() and value.is_inference() == torch.is_inference_mode_enabled()
        return value.clone() if is_copied and type(value) is Tensor else value
    if type(value) in (tuple, list):
        return type(value)(map(_apart, value))
    if type(value) is dict:
        return {key: _apart(item) for key, item in value.items()}
    return value


def differentiable(value: Any) -> list[Tensor]:
    """List the tensors in arguments or results that have a gradient."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in differentiable(item)]
