"""Lets adapters of whole parameters, such as PEFT's of fused experts, work on weights that stream.

PEFT registers a parametrization of torch for each call, which wants parameters; what a module finds while
it streams are tensors on the device. So the sum of weight and adapter takes the weight's place for the call,
made by the operations that PEFT's own parametrization runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError

ATTRIBUTE = "_activate_lora"
"""PEFT's method that the function takes the place of."""

Activate = Callable[[Sequence[str]], AbstractContextManager[None]]


Apart = Mapping[nn.Module, dict[str, list[tuple[Tensor, Tensor, float]]]]
"""The modules whose experts come apart, each with the adapters of its matrices that are active."""


def adapters_of_parameters(
    model: nn.Module, apart: Apart | None = None
) -> Iterator[tuple[nn.Module, Activate]]:
    """Yield the wrappers of a model's adapted parameters, each with what is to activate its adapters.

    Args:
        model: The model.
        apart: The modules whose weights are not there as a whole: their adapters are listed there, in place
            of being added to the weights.
    """
    for module in model.modules():
        if hasattr(type(module), ATTRIBUTE):
            listed = (apart or {}).get(module.get_base_layer())  # type: ignore[operator]
            yield module, _activation_of(module) if listed is None else _listing_of(module, listed)


def _listing_of(wrapper: Any, listed: dict[str, list[tuple[Tensor, Tensor, float]]]) -> Activate:
    @contextmanager
    def activate(active: Sequence[str]) -> Iterator[None]:
        adapters = [name for name in active if name in wrapper.lora_A]
        if len(adapters) > 1:
            raise ModelError(
                f"{len(adapters)} adapters of {wrapper.parameter_name} are active together, and its experts "
                "come in chunks; activate one, or attach with expert_chunks=1"
            )
        listed[wrapper.parameter_name] = [wrapper.get_delta_factors(name) for name in adapters]
        try:
            yield
        finally:
            del listed[wrapper.parameter_name]

    return activate


def _activation_of(wrapper: Any) -> Activate:
    @contextmanager
    def activate(active: Sequence[str]) -> Iterator[None]:
        adapters = [name for name in active if name in wrapper.lora_A]
        if not adapters:
            yield
            return
        held, name = wrapper.get_base_layer()._parameters, wrapper.parameter_name
        weight = held[name]
        if len(adapters) == 1 and wrapper.num_experts > 1:
            left, right, scaling = wrapper.get_delta_factors(adapters[0])
            with torch.autocast(device_type=weight.device.type, enabled=False):
                held[name] = torch.baddbmm(weight, left, right, alpha=scaling)
        else:
            held[name] = weight + functools.reduce(torch.add, map(wrapper.get_delta_weight, adapters))
        try:
            yield
        finally:
            held[name] = weight

    return activate
