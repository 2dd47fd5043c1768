"""Calls of modules in tiles, as autograd sees them.

A call is two nodes. The first saves what the backward needs, the second computes: a recomputation around the
call (`Recomputation`, torch's checkpoint) ends where the last saved tensor is there, and a module that
nothing is saved behind is not run for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from megatrain.model.places import Place, swapped
from megatrain.model.tiles.kept import Stored, Whole, store_in_use
from megatrain.model.torch_state import Autocast, casting_anew

Repeated: TypeAlias = Callable[[int], AbstractContextManager[object]]

_repeated: list[Repeated] = []
"""Not empty where work is counted and nothing is computed."""


@contextmanager
def few_tiles(repeated: Repeated) -> Iterator[None]:
    """Let calls run their first, second and last tile alone: those between do the work of the second.

    Args:
        repeated: The context in which a tile runs that stands for so many.
    """
    _repeated.append(repeated)
    try:
        yield
    finally:
        _repeated.pop()


def called(call: TiledCall, hidden: Tensor) -> Tensor:
    """Compute a call of (rows, tokens, ...), for autograd where something wants a gradient."""
    if not torch.is_grad_enabled() or not (hidden.requires_grad or any(call.wants)):
        with casting_anew():
            return call.compute(hidden)[0]
    call.has_backward = True
    store = store_in_use()
    call.source = None if store is None else store.source(hidden)
    ticket = _Save.apply(call, *[hidden] * call.uses, *call.weights)
    found: Tensor = _Compute.apply(call, ticket)
    if store is not None:
        store.passed()
    return found


class TiledCall(ABC):
    """One call of modules: what is put where in its backward."""

    def __init__(self, modules: Sequence[nn.Module], tokens: int, uses: int, hidden: Tensor) -> None:
        """Take note of the weights that modules have now.

        Args:
            modules: The modules that run.
            tokens: The tokens of a tile.
            uses: The number of uses of the input, each of which has a gradient of its own.
            hidden: The input: (rows, tokens, ...).
        """
        self._tokens, self.uses = tokens, uses
        self._autocast = Autocast(hidden.device)
        weights: dict[int, Tensor] = {}
        numbers: dict[int, int] = {}
        self._places: list[Place] = []
        self._numbers: list[int] = []
        """By place: the number of the weight that is there."""
        for module in (each for owner in modules for each in owner.modules()):
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
        self.source: Stored | None = None
        """Where the backward finds the input; None: autograd saves it."""
        self.gradient: Tensor | None = None
        """That of the output, between the two nodes' backward."""
        self.kept: list[Tensor] = []
        """What the second node has saved, between the two nodes' backward."""
        self.has_backward = False
        """Whether its gradients will be wanted."""
        self.is_in_place = False
        """The gradient of the input, which has one use, takes the place of the output's, tile by tile."""
        self.wants_input = False
        self._by_use: list[Tensor | None] = []
        self._sums: list[Tensor] = []

    @abstractmethod
    def compute(self, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output, without a graph, and what the backward needs beside the input."""

    @abstractmethod
    def go_back(self, hidden: Stored, gradient: Tensor, leaves: list[Tensor], kept: list[Tensor]) -> None:
        """Give the gradients of every tile to `take`; modules find `leaves` as their weights.

        Args:
            hidden: The input, where it waits.
            gradient: That of the output.
            leaves: The weights.
            kept: What `compute` returned beside the output, the list's to be emptied.
        """

    def tiles(self, hidden: Tensor | Stored) -> Iterator[slice]:
        """Yield the tokens of every tile, in order."""
        length = hidden.shape[1]
        every = [slice(start, min(start + self._tokens, length)) for start in range(0, length, self._tokens)]
        if not _repeated or len(every) < 4:
            yield from every
            return
        yield every[0]
        with _repeated[-1](len(every) - 2):
            yield every[1]
        yield every[-1]

    def take(
        self,
        outputs: list[Tensor],
        gradients: list[Tensor],
        part: Tensor,
        apart: Uses | None,
        leaves: list[Tensor],
        tile: slice,
    ) -> None:
        """Take the gradients of a tile's input and of the weights from those of its outputs."""
        parts = [part] if apart is None else apart.parts
        sources = parts * self.wants_input + [leaf for leaf in leaves if leaf.requires_grad]
        made = list(torch.autograd.grad(outputs, sources, gradients, allow_unused=True))
        if self.wants_input:
            put(self._by_use, made[: len(parts)], self._shape, tile)
        self.add(made[len(parts) * self.wants_input :])

    def add(self, made: Sequence[Tensor | None]) -> None:
        """Add a tile's gradients to those of the weights that want one."""
        for total, own in zip(self._sums, made, strict=True):
            if own is not None:
                total.add_(own)

    def gradients(
        self, hidden: Stored, weights: Sequence[Tensor], wants: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the input, by use, and of the weights; each is None if it is not wanted."""
        gradient, self.gradient = self.gradient, None
        kept, self.kept = self.kept, []
        assert gradient is not None
        self.wants_input, self._shape = wants[0], hidden.shape
        leaves = [
            weight.detach().requires_grad_(want)
            for weight, want in zip(weights, wants[self.uses :], strict=True)
        ]
        self._sums = [
            torch.zeros_like(leaf, dtype=torch.float32, memory_format=torch.contiguous_format)
            for leaf in leaves
            if leaf.requires_grad
        ]
        takes_place = self.is_in_place and self.wants_input and gradient.dtype == hidden.dtype
        self._by_use = [gradient] if takes_place else [None] * self.uses
        found = [leaves[number] for number in self._numbers]
        with swapped(self._places, found), torch.enable_grad(), self._autocast.again(), casting_anew():
            self.go_back(hidden, gradient, leaves, kept)
        totals, by_use = iter(self._sums), self._by_use
        self._sums, self._by_use = [], []
        by_weight = [next(totals).to(leaf.dtype) if leaf.requires_grad else None for leaf in leaves]
        return [*by_use, *by_weight]


class Uses(TorchFunctionMode):
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


def put(by_use: list[Tensor | None], made: Sequence[Tensor | None], shape: torch.Size, tile: slice) -> None:
    """Put a tile's gradients of its input in their places; more than there are places for are added up."""
    given = [gradient for gradient in made if gradient is not None]
    for number, gradient in enumerate(given):
        place = min(number, len(by_use) - 1)
        whole = by_use[place]
        if whole is None:
            whole = by_use[place] = gradient.new_zeros(shape)
        if place < number:
            whole[:, tile] += gradient
        else:
            whole[:, tile] = gradient


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: TiledCall, hidden: Tensor, *others: Tensor) -> Tensor:
        ctx.call = call
        weights = others[call.uses - 1 :]
        ctx.save_for_backward(*weights if call.source is not None else (hidden, *weights))
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        call: TiledCall = ctx.call
        weights = list(ctx.saved_tensors)
        source, call.source = call.source, None
        hidden = Whole(weights.pop(0)) if source is None else source
        return None, *call.gradients(hidden, weights, ctx.needs_input_grad[1:])


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: TiledCall, ticket: Tensor) -> Tensor:
        ctx.call = call
        hidden, call.hidden = call.hidden, None
        assert hidden is not None
        with casting_anew():
            found, kept = call.compute(hidden)
        ctx.save_for_backward(*kept)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.call.gradient = gradient
        ctx.call.kept = list(ctx.saved_tensors)
        return None, gradient.new_zeros(())
