"""Whether a model is done with its first layer's input when that layer has run.

A model's forward keeps its embeddings in a variable of its own until it returns, though it seldom reads them
again. In a long row they take as much as a boundary, so their memory is given back where a trial shows that
nobody misses it. A model that reads them all the same finds a tensor of no elements, which ends in an error
and never in other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from megatrain.errors import ModelError
from megatrain.model.small import SPECIAL_TOKENS, try_small_model

_ROWS, _TOKENS = 2, 8


def let_go(hidden: Tensor) -> None:
    """Let a tensor hold no memory any more; what autograd has saved of it stays."""
    hidden.data = hidden.new_empty(0)


def is_done_with_embeddings(config: PretrainedConfig) -> bool:
    """Whether a model gives the same without the first layer's input, once that layer has run.

    Args:
        config: The configuration of a causal language model. A small model of it is tried.
    """
    try:
        return try_small_model(config, _is_done)
    except ModelError:
        return False


def _is_done(model: PreTrainedModel) -> bool:
    expected = _run(model)
    first: list[nn.Module] = []

    def forget(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> None:
        if not first:
            first.append(module)
            given = (*args, *kwargs.values())
            let_go(next(value for value in given if isinstance(value, Tensor) and value.is_floating_point()))

    hooks = [layer.register_forward_hook(forget, with_kwargs=True) for layer in _layers(model)]
    try:
        found = _run(model)
    except Exception:  # each class fails in a way of its own without its embeddings
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return bool(first) and all(map(torch.equal, found, expected))


def _run(model: PreTrainedModel) -> list[Tensor]:
    """Return logits, and the gradients of all weights."""
    model.zero_grad(set_to_none=True)
    tokens = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS) % 40 + SPECIAL_TOKENS
    with torch.enable_grad(), _saving_apart(_layers(model)):
        logits = model(input_ids=tokens, use_cache=False).logits
        logits.sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def _saving_apart(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let what layers save be another tensor, of the same memory, as it is where a layer runs again.

    What is saved outside of them is the very tensor that is let go.
    """
    held = [(layer, layer.forward) for layer in layers]

    def apart(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
                return forward(*args, **kwargs)

        return run

    for layer, forward in held:
        layer.__dict__["forward"] = apart(forward)
    try:
        yield
    finally:
        for layer, _ in held:
            del layer.__dict__["forward"]
