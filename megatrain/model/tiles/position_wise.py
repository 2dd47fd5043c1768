"""Which modules of a decoder compute each token by itself: a small model of the configuration is tried.

Tiled are the largest such modules of a layer, and beside the layers, that keep more for their backward than
their input: an MLP, and norms that compute in fp32. A module that mixes tokens, such as attention, runs
whole, and so does a mixture of experts, but for what is beside its experts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from megatrain.config.attention import TILED
from megatrain.errors import ModelError, first_line
from megatrain.model.documents.begins import is_tiled, set_attention
from megatrain.model.experts.apart import are_experts
from megatrain.model.experts.routes import routers_of
from megatrain.model.small import SPECIAL_TOKENS, try_small_model
from megatrain.model.tiles.attention import GroupedAttention, groupable
from megatrain.model.tiles.joined import Either, Joined
from megatrain.model.tiles.last_norm import LastNorm
from megatrain.model.tiles.tiled import Tiled

_log = logging.getLogger(__name__)

_ROWS, _TOKENS, _CUT = 2, 8, 3
_LEAST_SHARE = 0.5
"""A module that keeps less than this share of its input beside it is not worth tiles."""


@dataclass(frozen=True, slots=True)
class Part:
    """A module that rows pass in tiles."""

    uses: int = 1
    """How often it uses its input, if others use it too."""
    before: nn.Module | None = None
    """The norm whose output it alone reads, which a tile passes first."""
    attends: bool = False
    """Whether it is attention, in tiles but for its heads."""
    is_last: bool = False
    """Whether it is a norm whose output is the decoder's last hidden states, and is nothing else's input."""


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


@dataclass(frozen=True, slots=True)
class _Found:
    """What a trial has shown of modules of one kind."""

    uses: int = 1
    before: str | None = None
    """The name of the norm in the layer."""
    attends: bool = False
    last: str | None = None
    """The name in its holder of the norm whose output the decoder's last hidden states are."""


Inner: TypeAlias = Callable[..., Any]
Compile: TypeAlias = Callable[[nn.Module, Inner], Inner]


def parts_in_tiles(model: PreTrainedModel, layers: Iterable[nn.Module]) -> dict[nn.Module, Part]:
    """Return the modules of a model's decoder that may pass rows in tiles.

    The model is not run. Modules in which dropout draws are left out: a tile runs twice, and would draw
    anew. There are none where no small model of the configuration can be made.

    Args:
        model: The model.
        layers: Its decoder layers.
    """
    try:
        kinds = try_small_model(model.config, partial(_kinds, is_tiled(model.config)))
    except ModelError:
        return {}
    parts: dict[nn.Module, Part] = {}
    for holder, module in _candidates(model, list(layers)):
        found = kinds.get(_Kind.of(holder, module))
        if found is not None and not _draws(module):
            before = None if found.before is None else holder.get_submodule(found.before)
            is_last = found.last is not None and holder.get_submodule(found.last) is module
            parts[module] = Part(found.uses, before, found.attends, is_last)
    return parts


def stand_ins(
    model: PreTrainedModel,
    layers: Iterable[nn.Module],
    tokens: int,
    *,
    compiled: Compile | None = None,
    are_apart: Callable[[nn.Module, nn.Module], bool] = lambda norm, module: False,
) -> dict[nn.Module, Inner]:
    """Return what stands for the forwards of modules, so that rows pass in tiles.

    Args:
        model: The model.
        layers: Its decoder layers.
        tokens: The tokens of a tile.
        compiled: The function that compiles a module's forward for tiles; None: they run as they are.
        are_apart: Whether weights of a norm and of the module behind it are never there together, so that
            each passes by itself. It changes no bit.
    """
    found: dict[nn.Module, Inner] = {}
    parts = parts_in_tiles(model, layers)
    compile = compiled or (lambda _, inner: inner)

    @cache
    def own(module: nn.Module) -> Inner:
        return compile(module, module.forward)

    def alone(module: nn.Module, uses: int) -> Inner:
        if parts[module].attends:
            return GroupedAttention(module, tokens, module.forward, uses=uses)
        if parts[module].is_last:
            # uncompiled: a graph for tiles and one for chunks of the head need not round a row alike
            return LastNorm(module, tokens, module.forward)
        return Tiled(module, tokens, own(module), uses=uses)

    def with_norm(module: nn.Module, norm: nn.Module) -> Inner:
        uses = parts[module].uses
        if parts[module].attends:
            return GroupedAttention(module, tokens, module.forward, uses=uses, before=norm)
        return Tiled(module, tokens, _chained(own(norm), own(module)), uses=uses, before=norm)

    for module, part in parts.items():
        if module in found:
            continue  # a norm that passes with another module
        before = part.before
        if before is None:
            found[module] = alone(module, part.uses)
        elif are_apart(before, module) or _draws(before):
            found[module] = alone(module, 1)
        else:
            joined = Joined(before, module)
            found[module] = Either(joined, with_norm(module, before), alone(module, 1))
            found[before] = Either(joined, _passed_on, alone(before, parts[before].uses))
    return found


def _chained(first: Inner, second: Inner) -> Inner:
    return lambda hidden: second(first(hidden))


def _passed_on(*args: Tensor, **kwargs: Tensor) -> Tensor:
    """Stand for a norm that tiles pass inside of the module behind it."""
    (hidden,) = (*args, *kwargs.values())
    return hidden


def tile(model: PreTrainedModel, layers: Iterable[nn.Module], tokens: int) -> Callable[[], None]:
    """Let a model run in tiles, in place; return what undoes it.

    Args:
        model: The model; its modules get forwards of their own.
        layers: Its decoder layers.
        tokens: The tokens of a tile.
    """
    found = stand_ins(model, layers, tokens)
    for module, forward in found.items():
        module.__dict__["forward"] = forward

    def undo() -> None:
        for module in found:
            module.__dict__.pop("forward", None)

    return undo


def _candidates(model: nn.Module, layers: list[nn.Module]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield modules with what holds them: parts of layers, and what is beside the layers."""
    held = set(layers)  # a small model's are those of its towers, too
    for layer in layers:
        for module in _outermost(layer):
            yield layer, module
    for decoder in model.modules():
        children = list(decoder.children())
        if any(isinstance(child, nn.ModuleList) and not held.isdisjoint(child) for child in children):
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


def _kinds(by_tiles: bool, model: PreTrainedModel) -> dict[_Kind, _Found]:
    """Try the modules of every layer of a small model, and return what was found of their kinds."""
    if by_tiles:
        set_attention(model, TILED)
    model.train()  # dropout draws, and what draws is not position by position
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    calls: dict[nn.Module, list[_ModuleCall]] = {}
    outputs: dict[nn.Module, Any] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.setdefault(module, []).append(_ModuleCall(args, kwargs, output))

    candidates = list(_candidates(model, layers))
    hooks = [module.register_forward_hook(note, with_kwargs=True) for _, module in candidates]
    for module in model.modules():
        if module is not model and module not in layers and any(each in layers for each in module.modules()):
            hooks.append(module.register_forward_hook(lambda one, _, output: outputs.update({one: output})))
    try:
        tokens = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS) % 40 + SPECIAL_TOKENS
        with torch.enable_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    trial = _Trial(calls, outputs, _edges(logits))
    for holder, module in candidates:
        trial.run(holder, module)
    trial.join(candidates)
    trial.note_last(candidates)
    return {kind: found for kind, found in trial.found.items() if kind not in trial.others}


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
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def given(self) -> list[Any]:
        """List the arguments."""
        return [*self.args, *self.kwargs.values()]

    @property
    def hidden(self) -> Tensor | None:
        """Return the hidden state, the first tensor of the arguments."""
        return next((value for value in self.given if isinstance(value, Tensor)), None)


@dataclass(slots=True)
class _Trial:
    """Tries modules of layers with the tensors that they were called with."""

    calls: dict[nn.Module, list[_ModuleCall]]
    outputs: dict[nn.Module, Any]
    """What modules have returned that hold layers, the whole model left out."""
    edges: Counter[tuple[Any, int]]
    found: dict[_Kind, _Found] = field(default_factory=dict)
    others: set[_Kind] = field(default_factory=set)
    """Those of the same name and class that were found to be otherwise."""

    def run(self, holder: nn.Module, module: nn.Module) -> None:
        """Try a module."""
        kind = _Kind.of(holder, module)
        if self._is_groupable(module):
            self._note(kind, _Found(self._uses(module), attends=True))
        elif not self._is_position_wise(module):
            self.others.add(kind)
        elif self._is_worth_it(module):
            self._note(kind, _Found(self._uses(module)))

    def _note(self, kind: _Kind, found: _Found) -> None:
        known = self.found.get(kind, found)
        self.found[kind] = replace(found, uses=max(found.uses, known.uses))

    def join(self, candidates: list[tuple[nn.Module, nn.Module]]) -> None:
        """Let norms pass with the modules behind them that alone read what they return."""
        joined: dict[_Kind, _Found] = {}
        apart: set[_Kind] = set()
        for holder, module in candidates:
            kind = _Kind.of(holder, module)
            norm = self._norm_before(holder, module)
            if norm is None:
                apart.add(kind)
            else:
                name = next(name for name, each in holder.named_modules() if each is norm)
                joined[kind] = replace(self.found[kind], uses=self._uses(norm), before=name)
        self.found |= {kind: found for kind, found in joined.items() if kind not in apart}

    def note_last(self, candidates: list[tuple[nn.Module, nn.Module]]) -> None:
        """Note which norm's output the last hidden states are."""
        for holder, module in candidates:
            kind = _Kind.of(holder, module)
            if kind in self.found and kind not in self.others and self._is_last(kind, module):
                name = next(name for name, each in holder.named_modules() if each is module)
                self.found[kind] = replace(self.found[kind], last=name)

    def _is_last(self, kind: _Kind, module: nn.Module) -> bool:
        """Whether every module around one returns its output as the last hidden states alone."""
        around = [output for each, output in self.outputs.items() if module in each.modules()]
        has_product = any(parameter.dim() > 1 for parameter in module.parameters())
        if self.found[kind] != _Found() or has_product or not around:
            return False
        normed: Tensor = self.calls[module][0].output
        for output in around:
            if getattr(output, "last_hidden_state", None) is not normed:
                return False
            others = tree_leaves([value for name, value in output.items() if name != "last_hidden_state"])
            tensors = [each for each in others if isinstance(each, Tensor)]
            uses = _edges(*tensors)[normed.grad_fn, normed.output_nr]
            if uses or any(each is normed for each in tensors):
                return False
        return True

    def _norm_before(self, holder: nn.Module, module: nn.Module) -> nn.Module | None:
        if _Kind.of(holder, module) not in self.found or len(self.calls.get(module, [])) != 1:
            return None
        hidden = self.calls[module][0].hidden
        norms = [each for each, calls in self.calls.items() if any(call.output is hidden for call in calls)]
        if len(norms) != 1 or norms[0] not in holder.children() or norms[0] is module:
            return None
        kind = _Kind.of(holder, norms[0])
        if kind not in self.found or kind in self.others or self.found[kind].attends:
            return None
        own, all_uses = self._own_uses(module)
        return norms[0] if own == all_uses else None

    def _is_groupable(self, module: nn.Module) -> bool:
        """Whether a module is attention that gives the same in tiles and groups of heads."""
        calls = self.calls.get(module, [])
        if len(calls) != 1 or calls[0].hidden is None:
            return False
        kwargs = {key: None if "mask" in key else value for key, value in calls[0].kwargs.items()}
        try:
            return groupable(GroupedAttention(module, _CUT, module.forward), calls[0].args, kwargs)
        except Exception as error:  # each class refuses in a way of its own what it cannot be given
            _log.debug("%s runs whole: %s", type(module).__name__, first_line(error))
            return False

    def _is_position_wise(self, module: nn.Module) -> bool:
        call = self._only_call(module)
        if call is None or call.hidden is None:
            return False
        hidden = call.hidden
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
        assert call.hidden is not None
        hidden = call.hidden.detach().requires_grad_()
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
        own, all_uses = self._own_uses(module)
        return own if all_uses > own else 1

    def _own_uses(self, module: nn.Module) -> tuple[int, int]:
        """Return how often a module uses its input, and how often it is used by anything."""
        call = self.calls[module][0]
        hidden = call.hidden
        assert hidden is not None
        leaf = hidden.detach().requires_grad_()

        def other(value: Any) -> Any:
            return leaf if value is hidden else value

        with torch.enable_grad():
            output = module(*map(other, call.args), **{key: other(v) for key, v in call.kwargs.items()})
        inside = _edges(*(each for each in tree_leaves(output) if isinstance(each, Tensor)))
        own = sum(number for (node, _), number in inside.items() if getattr(node, "variable", None) is leaf)
        return own, self.edges[hidden.grad_fn, hidden.output_nr]
