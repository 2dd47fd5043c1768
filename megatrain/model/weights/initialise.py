"""Draws initial weights into parameters that are already in place, by the model's own rules."""

from __future__ import annotations

import copy
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from megatrain.errors import ModelError
from megatrain.model.weights.skeleton import parameters_on_meta


@torch.no_grad()
def initialise_weights(model: PreTrainedModel, *, seed: int) -> None:
    """Initialise a model in place, bit for bit as a resident model in which this function is run.

    Every parameter is NaN before, so a parameter that the model's rules forget cannot pass for initialised.
    What the rules leave to the constructors is taken from a second construction of the model, in which only
    parameters of those shapes are allocated. The caller's random state is untouched.

    Args:
        model: The model with every parameter bound to real float32 storage.
        seed: The seed of the draws; the same seed gives the same weights.

    Raises:
        ModelError: Neither the rules nor the constructors give a parameter its value.
    """
    _forget_initialised(model)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.initialize_weights()
        _take_constructed(model, _without_value(model))
    left = _without_value(model)
    if left:
        raise ModelError(
            f"{type(model).__name__} does not initialise {', '.join(left[:4])}"
            f"{f' and {len(left) - 4} more' if len(left) > 4 else ''}; start from a checkpoint"
        )


def _without_value(model: nn.Module) -> list[str]:
    """Name the parameters in which a NaN is left."""
    # A sum is NaN when an element is, and needs no second tensor of the parameter's size.
    return [name for name, parameter in model.named_parameters() if bool(parameter.sum().isnan())]


def _take_constructed(model: PreTrainedModel, names: list[str]) -> None:
    """Give parameters that only their constructors set what a second construction makes of them."""
    if not names:
        return
    targets = {name: model.get_parameter(name) for name in names}
    shapes = {tuple(target.shape) for target in targets.values()}
    with parameters_on_meta(shapes), mock.patch.object(PreTrainedModel, "init_weights", return_value=None):
        constructed = type(model)(copy.deepcopy(model.config))
    for name, target in targets.items():
        target.copy_(constructed.get_parameter(name))


def _forget_initialised(model: nn.Module) -> None:
    """Clear the marks with which transformers skips what it has initialised or loaded before."""
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.__dict__.pop("_is_hf_initialized", None)
