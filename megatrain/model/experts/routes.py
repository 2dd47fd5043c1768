"""Routers of layers with experts: what they choose is noted, and chosen again where the layer runs again.

A router scores the experts for each token and takes the best. Where scores are nearly equal, a kernel that
does not repeat its bits could send a token to other experts in a recomputation, and the backward would then
be of a forward that nobody has run. So every run of a visit after its first gives a router its own choices
back, in the place where it makes them. All that follows is computed as ever, so weights belong to the experts
that were chosen, also where groups of experts are chosen first. A choice is kept in four bytes.

What is watched is the method of a router that chooses, and in it `topk`, and `max` along a dimension. A later
run reads scores at the kept indices, which are all that autograd saves of it, as in the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatrain.errors import ModelError

Choice: TypeAlias = tuple[Tensor, Tensor]
"""The best scores along a dimension, and their indices (int64)."""

Count: TypeAlias = Callable[[int, Tensor, int], object]
"""A function of the place of a router in its layer, the experts that it has chosen, and their number."""

COUNT_DTYPE = torch.int64
"""The type of the counts of tokens that a function of `Count` keeps."""
COUNT_BYTES = COUNT_DTYPE.itemsize

_DTYPE = torch.int32
"""The type of kept indices."""

_NAMES = frozenset({"router", "gate"})
"""Names that routers have in the modules of transformers, in layers that hold `experts`."""
_METHOD = "route_tokens_to_experts"
"""A method of modules that hold experts and choose among them themselves."""

_TOPK = frozenset({torch.topk, Tensor.topk})
_MAX = frozenset({torch.max, Tensor.max})

_routes: ContextVar[Routes | None] = ContextVar("routes", default=None)
"""Those of the visit that runs, which each thread has of its own, and each coroutine of a micro-batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """A module that chooses experts for each token."""

    name: str
    """The name of the module in the one in which it was found."""
    module: nn.Module
    method: str = "forward"
    """The name of its method that chooses."""


def routers_of(module: nn.Module) -> list[Router]:
    """Find the routers among the parts of a module; one that holds no experts has none.

    Args:
        module: A decoder layer, or a part of one.
    """
    leaves = {name: name.rpartition(".")[2] for name, _ in module.named_modules()}
    if "experts" not in leaves.values():
        return []
    found: list[Router] = []
    for name, part in module.named_modules():
        method = _METHOD if hasattr(type(part), _METHOD) else "forward"
        is_router = leaves[name] in _NAMES or method == _METHOD
        if is_router and not any(part is inner for router in found for inner in router.module.modules()):
            found.append(Router(name, part, method))
    return found


class Routes:
    """What the routers of a layer choose in one visit: in its first run, and the same in all that follow."""

    def __init__(self, name: str, *, keeps: bool = True, count: Count | None = None) -> None:
        """Know of no choice yet.

        Args:
            name: The name of the layer, for messages.
            keeps: Whether the layer may run again, so that choices are kept.
            count: The function that is given the experts that each router has chosen in the first run.
        """
        self._name = name
        self._keeps = keeps
        self._count = count
        self._num_routers = 0
        """Routers that have chosen their experts in the first run."""
        self.kept: list[Tensor] = []
        """The indices of each choice, in their order."""
        self._num_chosen = 0
        """Choices of the run that is going on, or was last."""
        self._has_run = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take what routers choose within this context for the choices of a run of the visit."""
        self._num_chosen = 0
        try:
            with _as_running(self):
                yield
        finally:
            self._has_run = True  # a run that follows may end early, through an exception

    def choose(
        self, scores: Tensor, dim: int, make: Callable[[], Choice], *, keeps_dim: bool = True
    ) -> Choice:
        """Return the choice that `make` makes in the first run, and what was chosen there in all others.

        Args:
            scores: The scores of which some are chosen.
            dim: The dimension along which they are.
            make: The function that chooses.
            keeps_dim: Whether the choice has this dimension.

        Raises:
            ModelError: The layer does not do the same twice.
        """
        number, self._num_chosen = self._num_chosen, self._num_chosen + 1
        if not self._has_run:
            values, indices = make()
            if self._keeps:
                kept = indices.detach().to(_DTYPE)
                self.kept.append(kept if keeps_dim else kept.unsqueeze(dim))
            return values, indices
        if number >= len(self.kept) or _without(self.kept[number], dim) != _without(scores, dim):
            raise ModelError(
                f"a router of {self._name} does not choose for the same tokens in its recomputation as in "
                "the forward (does it keep state between calls?); use activations=keep"
            )
        values, indices = _Again.apply(scores, self.kept[number].long(), dim, keeps_dim)
        return values, indices

    def chose_experts(self, indices: Tensor, num_experts: int) -> None:
        """Take note that the next router has chosen these of its experts, the last of its choices."""
        if self._count is not None and not self._has_run:
            self._count(self._num_routers, indices, num_experts)
            self._num_routers += 1


def running_routes() -> Routes | None:
    """Return the routes of the visit that runs; None: no layer with routers does."""
    return _routes.get()


def unnoticed() -> AbstractContextManager[object]:
    """Let what routers choose within this context be no choices of a visit."""
    return _as_running(None)


@contextmanager
def _as_running(routes: Routes | None) -> Iterator[None]:
    outer = _routes.get()
    _routes.set(routes)  # a token could not be used: a coroutine may be ended by another one
    try:
        yield
    finally:
        _routes.set(outer)


def _without(tensor: Tensor, dim: int) -> list[int]:
    shape = list(tensor.shape)
    del shape[dim]
    return shape


def watched(routers: Sequence[Router]) -> AbstractContextManager[object]:
    """Let the choices of routers be those of the visit that runs.

    Args:
        routers: The routers, whose modules run uncompiled in this context; without one, or where no visit
            runs, nothing changes.
    """
    return _watched(routers) if routers and running_routes() is not None else nullcontext()


@contextmanager
def _watched(routers: Sequence[Router]) -> Iterator[None]:
    held = []
    for router in routers:
        attributes, method = router.module.__dict__, router.method
        own = attributes.get(method)
        if not isinstance(own, _Watching):  # or another visit is under way
            held.append((attributes, method, own))
            attributes[method] = _Watching(getattr(router.module, method))
    try:
        yield
    finally:
        for attributes, method, own in held:
            del attributes[method]
            if own is not None:
                attributes[method] = own


class _Watching:
    """A router's own method, whose choices are those of the visit that runs when it is called."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routes = running_routes()
        if routes is None:
            return self._inner(*args, **kwargs)
        choices = _Choices(routes)
        with choices:
            result = self._inner(*args, **kwargs)
        if choices.experts is not None:
            routes.chose_experts(*choices.experts)
        return result


class _Choices(TorchFunctionMode):
    """Lets a visit choose where a router calls `topk`, or `max` along a dimension."""

    def __init__(self, routes: Routes) -> None:
        super().__init__()
        self._routes = routes
        self.experts: tuple[Tensor, int] | None = None
        """The last choice of `topk`, and among how many it was; those of `max` are of steps on the way."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK:
            scores, _, dim = _named(args, kwargs, {"input": None, "k": None, "dim": -1})
            chosen = self._routes.choose(scores, dim, lambda: func(*args, **kwargs))
            self.experts = chosen[1], scores.shape[dim]
            return torch.return_types.topk(chosen)
        if func in _MAX:
            scores, dim, keeps_dim = _named(args, kwargs, {"input": None, "dim": None, "keepdim": False})
            if isinstance(dim, int):
                return torch.return_types.max(
                    self._routes.choose(scores, dim, lambda: func(*args, **kwargs), keeps_dim=keeps_dim)
                )
        return func(*args, **kwargs)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], defaults: dict[str, Any]) -> list[Any]:
    """Return the first arguments of a call by their names."""
    return list({**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}.values())[: len(defaults)]


class _Again(torch.autograd.Function):
    """Reads scores at kept indices: what the second run of a choice saves is what the first one has saved."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, indices: Tensor, dim: int, keeps_dim: bool) -> Choice:
        ctx.dim, ctx.keeps_dim, ctx.shape = dim, keeps_dim, scores.shape
        indices = indices if keeps_dim else indices.squeeze(dim)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        at = indices if keeps_dim else indices.unsqueeze(dim)
        values = scores.gather(dim, at)
        return values if keeps_dim else values.squeeze(dim), indices

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        if not ctx.keeps_dim:
            gradient, indices = gradient.unsqueeze(ctx.dim), indices.unsqueeze(ctx.dim)
        return gradient.new_zeros(ctx.shape).scatter(ctx.dim, indices, gradient), None, None, None
