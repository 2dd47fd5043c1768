"""The decoder of a causal language model, whose last hidden states its head takes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the module inside whose last hidden states the head takes; None: there is none.

    Args:
        model: The causal language model, without a wrapper of adapters.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    if decoder is model.get_output_embeddings():  # transformers asks for a module of that name first
        decoder = model.base_model
    if decoder is model:  # its files have another name for its decoder than its code (Llama 4)
        inside = [child for child in model.children() if isinstance(child, PreTrainedModel)]
        decoder = inside[0] if len(inside) == 1 else None
    if not isinstance(decoder, nn.Module):
        return None
    # one with a head of its own makes logits and loss itself (Kosmos-2.5)
    has_head = isinstance(decoder, PreTrainedModel) and decoder.get_output_embeddings() is not None
    return None if has_head else decoder


@contextmanager
def without_hooks(module: nn.Module, *, inside: bool = True) -> Iterator[None]:
    """Let calls of a module, and of all inside, run no hooks of forwards for as long as the context lasts."""
    modules = [*module.modules()] if inside else [module]
    held = [(one, one._forward_hooks, one._forward_pre_hooks) for one in modules]
    for one in modules:
        one._forward_hooks, one._forward_pre_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for one, hooks, pre_hooks in held:
            one._forward_hooks, one._forward_pre_hooks = hooks, pre_hooks
