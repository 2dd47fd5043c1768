"""Layers whose experts come apart: a module with the matrices of all experts becomes chunks of whole experts.

Transformers runs such a module through its interface for experts: tokens are sorted by expert, two grouped
products with an activation between them are made, and the results are weighted and summed per token. Rows of
a grouped product that belong to some experts are those of a product of these experts alone, bit for bit.

What a layer does behind its experts decides two things: which of its weights are needed when the chunks have
passed, and whether the backward needs what the experts returned. A small model of the configuration shows it.

Source: `transformers.integrations.moe`, whose `grouped_mm_experts_forward` a chunk computes a part of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from megatrain.errors import ModelError
from megatrain.layout.expert_chunks import chunk_ranges, least_chunk
from megatrain.model.small import SPECIAL_TOKENS, try_small_model

IMPLEMENTATION = "grouped_mm"
"""The implementation of experts whose bits chunks have."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The module of a layer that has the matrices of all its experts."""

    name: str
    """Its name in the layer."""
    module: Any
    matrices: tuple[str, str]
    """Names of the parameters of the first product and of the second: (experts, rows, columns)."""

    @property
    def number(self) -> int:
        """Return the number of experts."""
        return len(self.module._parameters[self.matrices[0]])

    def chunks(self, number: int) -> list[range]:
        """Cut the experts into at most so many chunks of nearly equal size; one: they do not come apart."""
        return chunk_ranges(self.number, self.least_chunk, number)

    @property
    def least_chunk(self) -> int:
        """Return the number of experts of which a chunk has a multiple."""
        return least_chunk(self.module.get_parameter(name)[0].numel() for name in self.matrices)


@dataclass(frozen=True, slots=True)
class BehindExperts:
    """What a kind of layer does once its experts have returned."""

    modules: frozenset[str]
    """Names, in the layer, of the modules with weights that it calls then; none is within another."""
    saves_output: bool
    """Whether what autograd saves then depends on what the experts returned."""


def experts_of(layer: nn.Module, *, implementation: str = IMPLEMENTATION) -> Experts | None:
    """Find the experts of a decoder layer that may come apart; None: it has none."""
    found = [
        found for found in _experts(layer) if found.module.config._experts_implementation == implementation
    ]
    return found[0] if len(found) == 1 else None


def part_to_compile(layer: nn.Module, apart: Collection[nn.Module]) -> nn.Module | None:
    """Return the largest part of a layer with none of some modules in it, such as its attention, if any.

    The layer as a whole is no graph where modules of it run in a way of their own, such as experts that give
    way to other micro-batches in the middle.
    """
    others = [child for child in layer.children() if not any(each in apart for each in child.modules())]
    sizes = [sum(parameter.numel() for parameter in child.parameters()) for child in others]
    return others[sizes.index(max(sizes))] if any(sizes) else None


def are_experts(module: nn.Module) -> bool:
    """Whether a module has the matrices of all experts, for transformers' interface."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")


def _experts(layer: nn.Module) -> Iterator[Experts]:
    module: Any
    for name, module in layer.named_modules():
        if not are_experts(module):
            continue
        matrices = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        is_plain = not (module._is_expert_parallel or module.has_post_expert_norm)
        if is_plain and all(isinstance(module._parameters.get(leaf), nn.Parameter) for leaf in matrices):
            yield Experts(name, module, matrices)


def behind_experts(model: PreTrainedModel) -> Mapping[str, BehindExperts]:
    """Say what each class of layers with experts does behind them; without a class, its experts stay whole.

    A class is left out where a weight is needed both before its experts and behind them, where one is read
    behind them that belongs to no module called there, and where autograd saves anything behind them though
    no weight is there. All are left out where no small model of the configuration can be made.
    """
    try:
        return try_small_model(model.config, _behind)
    except ModelError:
        return {}


def _behind(model: PreTrainedModel) -> dict[str, BehindExperts]:
    watches = [_Watch(layer, found) for layer, found in _layers_with_experts(model)]
    model.train()  # dropout saves something, too
    try:
        tokens = torch.arange(8)[None] % 40 + SPECIAL_TOKENS
        with torch.enable_grad(), _Reads(watches):
            model(input_ids=tokens, use_cache=False)
    finally:
        for watch in watches:
            watch.remove()
    found: dict[str, BehindExperts] = {}
    for watch in watches:
        kind = type(watch.layer).__name__
        if watch.behind is not None and found.setdefault(kind, watch.behind) != watch.behind:
            raise ModelError(f"layers of {kind} differ in what they do behind their experts")
    return found


def _layers_with_experts(model: PreTrainedModel) -> Iterator[tuple[nn.Module, Experts]]:
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            found = experts_of(layer, implementation="eager")
            if found is not None:
                yield layer, found


class _Watch:
    """Follows one forward of a layer, whose experts return nothing but NaN."""

    def __init__(self, layer: nn.Module, experts: Experts) -> None:
        self.layer = layer
        self.parameters = {id(p) for p in layer.parameters()} - {id(p) for p in experts.module.parameters()}
        """Its weights but for the experts', by identity."""
        self._before: set[int] = set()
        self._after: set[int] = set()
        self._modules: set[str] = set()
        """Names of the modules that were called behind the experts."""
        self._has_passed = self._was_passed = self._saves = self._saves_output = False
        self._saved = saved_tensors_hooks(self._save, lambda tensor: tensor)
        hooks = [layer.register_forward_pre_hook(self._enter), layer.register_forward_hook(self._leave)]
        hooks.append(experts.module.register_forward_hook(self._pass_experts))
        for name, module in layer.named_modules():
            if experts.module not in module.modules() and any(True for _ in module.parameters()):
                hooks.append(module.register_forward_pre_hook(partial(self._call, name)))
        self._hooks = hooks

    @property
    def behind(self) -> BehindExperts | None:
        """What the layer did behind its experts; None: they cannot come apart."""
        names = [name for name in self._modules if not self._is_within_another(name)]
        held = {id(p) for name in names for p in self.layer.get_submodule(name).parameters()}
        if not self._was_passed or held & self._before or self._after - held:
            return None
        if self._saves and not held:
            return None  # a recomputation behind the experts would come before the experts go back
        return BehindExperts(frozenset(names), self._saves_output)

    def read(self, parameter: int) -> None:
        """Take note that a function is given a weight."""
        (self._after if self._has_passed else self._before).add(parameter)

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _is_within_another(self, name: str) -> bool:
        return any(name.startswith(f"{other}.") for other in self._modules)

    def _enter(self, *_: object) -> None:
        self._has_passed = False
        self._saved.__enter__()

    def _leave(self, module: nn.Module, args: object, output: Any) -> Any:
        self._saved.__exit__(None, None, None)
        if isinstance(output, Tensor):
            return output.nan_to_num()
        return type(output)(o.nan_to_num() if isinstance(o, Tensor) else o for o in output)

    def _pass_experts(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        self._has_passed = self._was_passed = True
        return torch.full_like(output, math.nan)

    def _call(self, name: str, *_: object) -> None:
        if self._has_passed:
            self._modules.add(name)

    def _save(self, tensor: Tensor) -> Tensor:
        if self._has_passed:
            self._saves = True
            self._saves_output |= tensor.is_floating_point() and bool(tensor.isnan().any())
        return tensor.detach()  # a node that saved its own output would never be freed


class _Reads(TorchFunctionMode):
    """Tells which weights of the watched layers functions are given."""

    def __init__(self, watches: Sequence[_Watch]) -> None:
        super().__init__()
        self._watches = {parameter: watch for watch in watches for parameter in watch.parameters}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(each, Tensor) for each in tree_leaves(found)):  # not a shape, nor a precision
            for given in tree_leaves((args, kwargs)):
                if id(given) in self._watches:
                    self._watches[id(given)].read(id(given))
        return found
