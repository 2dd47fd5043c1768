"""Position-wise modules in tiles: a few thousand tokens of a row at a time, forward and backward.

What a module keeps for its backward is its input alone. The backward runs each tile again, and takes its
gradient: what is inside of the module, such as the wide activations of an MLP, is there for one tile. Outputs
and gradients of inputs are those of the whole row. Gradients of weights add up over tiles in fp32, in the
order of the tiles, so their last bits depend on the tiles' length.

A call is two nodes of autograd. The first saves what the backward needs, the second computes: a recomputation
around the call (`Recomputation`, torch's checkpoint) ends where the last saved tensor is there, and a module
that nothing is saved behind is not run for it.

Source: the chain rule cut over tokens, as in StreamBP (Luo et al., 2025) and ALST's tiled MLP (Bekman et al.,
2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from megatrain.model.places import Place, swapped
from megatrain.model.selective import kept_by_none
from megatrain.model.torch_state import Autocast


class Tiled:
    """Stands for the forward of a position-wise module."""

    def __init__(
        self, module: nn.Module, tokens: int, inner: Callable[[Tensor], Tensor], *, uses: int = 1
    ) -> None:
        """Prepare; the module is not changed.

        Args:
            module: A module that computes each token of one tensor by itself (`position_wise_modules`).
            tokens: The tokens of a tile.
            inner: What a tile runs through: the module's own forward, or a compiled one.
            uses: How often the module uses its input, if others use it too. Autograd adds the gradients of
                so many uses to those of others one by one, and so they are handed to it one by one.
        """
        self.module, self.tokens, self.inner, self.uses = module, tokens, inner, uses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module of (rows, tokens, ...)."""
        given = [*args, *kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dim() < 3:
            return self.inner(*args, **kwargs)
        (hidden,) = given
        if hidden.shape[1] <= self.tokens:
            return self.inner(hidden)
        call = _Call(self, hidden)
        if not torch.is_grad_enabled() or not (hidden.requires_grad or any(call.wants)):
            return call.compute(hidden)
        ticket = _Save.apply(call, *[hidden] * self.uses, *call.weights)
        found: Tensor = _Compute.apply(call, ticket)
        return found


class _Call:
    """One call: what is put where in its backward."""

    def __init__(self, tiled: Tiled, hidden: Tensor) -> None:
        self._inner, self._tokens, self.uses = tiled.inner, tiled.tokens, tiled.uses
        self._autocast = Autocast(hidden.device)
        weights: dict[int, Tensor] = {}
        numbers: dict[int, int] = {}
        self._places: list[Place] = []
        self._numbers: list[int] = []
        """By place: the number of the weight that is there."""
        for module in tiled.module.modules():
            for leaf, weight in module._parameters.items():
                if weight is not None:
                    numbers.setdefault(id(weight), len(weights))
                    weights.setdefault(id(weight), weight)
                    self._places.append((module._parameters, leaf))
                    self._numbers.append(numbers[id(weight)])
        self.weights = list(weights.values())
        self.wants = [weight.requires_grad for weight in self.weights]
        self.hidden: Tensor | None = hidden
        """The input, until it is computed."""
        self.gradient: Tensor | None = None
        """That of the output, between the two nodes' backward."""

    def compute(self, hidden: Tensor) -> Tensor:
        """Return the module's output, tile by tile; autograd takes no note of it."""
        self.hidden = None
        found: Tensor | None = None
        with kept_by_none(), torch.no_grad():
            for tile in self._tiles(hidden):
                part = self._inner(hidden[:, tile].contiguous())
                if found is None:
                    found = part.new_empty((*hidden.shape[:2], *part.shape[2:]))
                found[:, tile] = part
        assert found is not None
        return found

    def go_back(
        self, hidden: Tensor, weights: Sequence[Tensor], wants: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the input, by use, and of the weights; each is None if it is not wanted."""
        gradient, self.gradient = self.gradient, None
        assert gradient is not None
        wants_input, wants_weights = wants[0], wants[self.uses :]
        leaves = [
            weight.detach().requires_grad_(want) for weight, want in zip(weights, wants_weights, strict=True)
        ]
        sums = [
            torch.zeros_like(leaf, dtype=torch.float32, memory_format=torch.contiguous_format)
            for leaf in leaves
            if leaf.requires_grad
        ]
        by_use: list[Tensor | None] = [None] * self.uses
        found = [leaves[number] for number in self._numbers]
        with swapped(self._places, found), torch.enable_grad(), self._autocast.again():
            for tile in self._tiles(hidden):
                part = hidden[:, tile].detach().contiguous().requires_grad_(wants_input)
                apart = _Uses(part) if wants_input and self.uses > 1 else None
                with apart or nullcontext():
                    out = self._inner(part)
                parts = [part] if apart is None else apart.parts
                sources = parts * wants_input + [leaf for leaf in leaves if leaf.requires_grad]
                made = list(
                    torch.autograd.grad(out, sources, gradient[:, tile].contiguous(), allow_unused=True)
                )
                del out, part, apart
                if wants_input:
                    _put(by_use, made[: len(parts)], hidden, tile)
                for total, own in zip(sums, made[len(parts) * wants_input :], strict=True):
                    if own is not None:
                        total.add_(own)
                del made
        totals = iter(sums)
        by_weight = [next(totals).to(leaf.dtype) if leaf.requires_grad else None for leaf in leaves]
        return [*by_use, *by_weight]

    def _tiles(self, hidden: Tensor) -> Iterator[slice]:
        length = hidden.shape[1]
        for start in range(0, length, self._tokens):
            yield slice(start, min(start + self._tokens, length))


class _Uses(TorchFunctionMode):
    """Gives every function that uses a tensor one of its own, so that the gradient of each use is known."""

    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self._part = part
        self._known = {id(part)}
        self.parts: list[Tensor] = []
        """What functions were given, in the order in which autograd comes to them: the last one first."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own: list[Tensor] = []

        def apart(value: Any) -> Any:
            if id(value) not in self._known:
                return value
            if not own:
                own.append(self._part.detach().requires_grad_())
            return own[0]

        args, kwargs = tree_map(apart, (args, dict(kwargs or {})))
        if own:
            self.parts.insert(0, own[0])
            self._known.add(id(own[0]))
        return func(*args, **kwargs)


def _put(by_use: list[Tensor | None], made: Sequence[Tensor | None], hidden: Tensor, tile: slice) -> None:
    """Put a tile's gradients of its input in their places; more than there are places for are added up."""
    given = [gradient for gradient in made if gradient is not None]
    for number, gradient in enumerate(given):
        place = min(number, len(by_use) - 1)
        whole = by_use[place]
        if whole is None:
            whole = by_use[place] = torch.zeros_like(hidden)
        if place < number:
            whole[:, tile] += gradient
        else:
            whole[:, tile] = gradient


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor, *others: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(hidden, *others[call.uses - 1 :])
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        hidden, *weights = ctx.saved_tensors
        return None, *ctx.call.go_back(hidden, weights, ctx.needs_input_grad[1:])


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, ticket: Tensor) -> Tensor:
        ctx.call = call
        assert call.hidden is not None
        return call.compute(call.hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.call.gradient = gradient
        return None, gradient.new_zeros(())
