"""Which modules of a decoder compute each token by itself: a small model of the configuration is tried.

Tiled are the largest such modules of a layer, and beside the layers, that keep more for their backward than
their input: an MLP, and norms that compute in fp32. A module that mixes tokens, such as attention, runs
whole, and so does a mixture of experts, but for what is beside its experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from megatrain.errors import ModelError
from megatrain.model.experts.apart import are_experts
from megatrain.model.experts.routes import routers_of
from megatrain.model.small import SPECIAL_TOKENS, try_small_model
from megatrain.model.tiles.tiled import Tiled

_ROWS, _TOKENS, _CUT = 2, 8, 3
_LEAST_SHARE = 0.5
"""A module that keeps less than this share of its input beside it is not worth tiles."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The classes of a module and of what holds it, which a small model has in common with others."""

    holder: str
    """The class of the layer, or of the decoder."""
    module: str
    """Its own."""

    @classmethod
    def of(cls, holder: nn.Module, module: nn.Module) -> _Kind:
        return cls(type(holder).__name__, type(module).__name__)


def position_wise_modules(model: PreTrainedModel, layers: Iterable[nn.Module]) -> dict[nn.Module, int]:
    """Return the modules of a model's decoder that may pass rows in tiles, with `Tiled`'s number of uses.

    The model is not run. Modules in which dropout draws are left out: a tile runs twice, and would draw
    anew. There are none where no small model of the configuration can be made.

    Args:
        model: The model.
        layers: Its decoder layers.
    """
    try:
        kinds = try_small_model(model.config, _kinds)
    except ModelError:
        return {}
    return {
        module: kinds[_Kind.of(holder, module)]
        for holder, module in _candidates(model, list(layers))
        if _Kind.of(holder, module) in kinds and not _draws(module)
    }


def tile(model: PreTrainedModel, layers: Iterable[nn.Module], tokens: int) -> Callable[[], None]:
    """Let the position-wise modules of a model run in tiles, in place; return what undoes it.

    Args:
        model: The model; its modules get forwards of their own.
        layers: Its decoder layers.
        tokens: The tokens of a tile.
    """
    modules = position_wise_modules(model, layers)
    for module, uses in modules.items():
        module.__dict__["forward"] = Tiled(module, tokens, module.forward, uses=uses)

    def undo() -> None:
        for module in modules:
            module.__dict__.pop("forward", None)

    return undo


def _candidates(model: nn.Module, layers: list[nn.Module]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield modules with what holds them: parts of layers, and what is beside the layers."""
    for layer in layers:
        for module in _outermost(layer):
            yield layer, module
    for decoder in model.modules():
        children = list(decoder.children())
        if any(isinstance(child, nn.ModuleList) and layers[0] in child for child in children):
            for child in children:
                if not isinstance(child, nn.ModuleList):
                    yield decoder, child


def _outermost(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield a layer's children, and in the place of one with experts or a router what is beside these."""
    routers = {router.module for router in routers_of(layer)}

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if not any(are_experts(each) or each in routers for each in child.modules()):
                yield child
            elif not are_experts(child) and child not in routers:
                yield from walk(child)

    return walk(layer)


def _draws(module: nn.Module) -> bool:
    return any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.modules())


def _kinds(model: PreTrainedModel) -> dict[_Kind, int]:
    """Try the modules of every layer of a small model, and return the uses of those that were found."""
    model.train()  # dropout draws, and what draws is not position by position
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    calls: dict[nn.Module, list[_ModuleCall]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.setdefault(module, []).append(_ModuleCall([*args, *kwargs.values()], output))

    candidates = list(_candidates(model, layers))
    hooks = [module.register_forward_hook(note, with_kwargs=True) for _, module in candidates]
    try:
        tokens = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS) % 40 + SPECIAL_TOKENS
        with torch.enable_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    trial = _Trial(calls, _edges(logits))
    for holder, module in candidates:
        trial.run(holder, module)
    return {kind: uses for kind, uses in trial.found.items() if kind not in trial.others}


def _edges(*results: Tensor) -> Counter[tuple[Any, int]]:
    """Count how often each tensor is used in a graph; tensors by their node and their number there."""
    found: Counter[tuple[Any, int]] = Counter()
    met: set[Any] = set()
    waiting = [result.grad_fn for result in results]
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        found.update(edge for edge in node.next_functions if edge[0] is not None)
        waiting += [edge[0] for edge in node.next_functions]
    return found


@dataclass(frozen=True, slots=True)
class _ModuleCall:
    given: list[Any]
    output: Any


@dataclass(slots=True)
class _Trial:
    """Tries modules of layers with the tensors that they were called with."""

    calls: dict[nn.Module, list[_ModuleCall]]
    edges: Counter[tuple[Any, int]]
    found: dict[_Kind, int] = field(default_factory=dict)
    others: set[_Kind] = field(default_factory=set)
    """Those of the same name and class that were found not to be position by position."""

    def run(self, holder: nn.Module, module: nn.Module) -> None:
        """Try a module."""
        kind = _Kind.of(holder, module)
        if not self._is_position_wise(module):
            self.others.add(kind)
        elif self._is_worth_it(module):
            self.found[kind] = max(self.found.get(kind, 1), self._uses(module))

    def _is_position_wise(self, module: nn.Module) -> bool:
        call = self._only_call(module)
        if call is None:
            return False
        (hidden,) = call.given
        with torch.no_grad():
            parts = [module(part.contiguous()) for part in (hidden[:, :_CUT], hidden[:, _CUT:])]
        again = torch.cat(parts, dim=1)
        return again.shape == call.output.shape and torch.allclose(again, call.output, rtol=1e-4, atol=1e-5)

    def _only_call(self, module: nn.Module) -> _ModuleCall | None:
        """Return the one call of a module, with a tensor of tokens alone; None: it was called otherwise."""
        calls = self.calls.get(module, [])
        if len(calls) != 1 or len(calls[0].given) != 1:
            return None
        tensors = [*calls[0].given, calls[0].output]
        is_of_tokens = all(
            isinstance(tensor, Tensor) and tensor.dim() > 2 and tensor.shape[:2] == (_ROWS, _TOKENS)
            for tensor in tensors
        )
        return calls[0] if is_of_tokens and tensors[0].is_floating_point() else None

    def _is_worth_it(self, module: nn.Module) -> bool:
        call = self._only_call(module)
        assert call is not None
        hidden = call.given[0].detach().requires_grad_()
        known = {each.untyped_storage().data_ptr() for each in (hidden, *module.parameters())}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a node that saved its own output would never be freed

        with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            module(hidden)
        return sum(kept.values()) > _LEAST_SHARE * hidden.nbytes

    def _uses(self, module: nn.Module) -> int:
        """Return how often a module uses its input, if something else does too; else 1."""
        call = self._only_call(module)
        assert call is not None
        hidden = call.given[0]
        leaf = hidden.detach().requires_grad_()
        with torch.enable_grad():
            inside = _edges(module(leaf))
        own = sum(number for (node, _), number in inside.items() if getattr(node, "variable", None) is leaf)
        return own if self.edges[hidden.grad_fn, hidden.output_nr] > own else 1
