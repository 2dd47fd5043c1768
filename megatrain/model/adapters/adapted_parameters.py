"""Lets adapters of whole parameters, such as PEFT's of fused experts, work on weights that stream.

PEFT registers a parametrization of torch for each call, which wants parameters; what a module finds while
it streams are tensors on the device. So the sum of weight and adapter takes the weight's place for the call,
made by the operations that PEFT's own parametrization runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

ATTRIBUTE = "_activate_lora"
"""PEFT's method that the function takes the place of."""

Activate = Callable[[Sequence[str]], AbstractContextManager[None]]


def adapters_of_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, Activate]]:
    """Yield the wrappers of a model's adapted parameters, each with what is to activate its adapters."""
    for module in model.modules():
        if hasattr(type(module), ATTRIBUTE):
            yield module, _activation_of(module)


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
