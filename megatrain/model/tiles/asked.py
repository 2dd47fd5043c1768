"""What an attention module is called with, and what it asks its attention function for.

Modules find that function in transformers' registry, where another one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import Cache, DynamicCache
from transformers.modeling_utils import AttentionInterface


@dataclass(frozen=True, slots=True)
class Given:
    """What a module is called with beside its hidden state, which nothing holds here."""

    key: int | str
    """The hidden state's place: it is the first tensor of the arguments."""
    length: int
    """Its tokens."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], *, with_cache: bool = False
    ) -> tuple[Given | None, Tensor]:
        """Part the hidden state from the rest; None: there is none of (rows, tokens, width), or a cache."""
        keys: list[int | str] = [*range(len(args)), *kwargs]
        values = dict(zip(keys, [*args, *kwargs.values()], strict=True))
        key = next((key for key, value in values.items() if isinstance(value, Tensor)), None)
        has_cache = not with_cache and any(isinstance(value, Cache) for value in values.values())
        hidden = torch.empty(0) if key is None else values[key]
        if key is None or has_cache or hidden.dim() != 3 or not hidden.is_floating_point():
            return None, hidden
        rest = [None if n == key else value for n, value in enumerate(args)]
        named = {name: None if name == key else value for name, value in kwargs.items()}
        return cls(key, hidden.shape[1], rest, named), hidden

    def run(self, inner: Callable[..., Any], hidden: Tensor) -> Any:
        """Call a function with a hidden state."""
        args = [hidden if n == self.key else value for n, value in enumerate(self.args)]
        return inner(*args, **{k: hidden if k == self.key else value for k, value in self.kwargs.items()})

    def tile(self, tile: slice) -> tuple[Given, dict[int, Tensor]]:
        """Return the same for some tokens, and the whole of every tensor that was cut, by its part's id."""
        wholes: dict[int, Tensor] = {}

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            part = value[:, tile] if value.dim() > 1 and value.shape[1] == self.length else value
            wholes[id(part)] = value
            return part

        args, kwargs = tree_map(cut, (list(self.args), dict(self.kwargs)))
        return Given(self.key, self.length, args, kwargs), wholes


def without_caches(given: Any) -> Any:
    """Leave caches out that a training forward fills and nobody reads: `with_own_caches`."""

    def is_idle(value: Any) -> bool:
        return type(value) is DynamicCache and torch.is_grad_enabled() and value.get_seq_length() == 0

    return tree_map(lambda value: None if is_idle(value) else value, given)


class Stopped(BaseException):
    """A module has come to its attention."""

    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self.asked = asked


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of an attention function."""

    function: Callable[..., Any]
    heads: tuple[Tensor, Tensor, Tensor]
    """Queries, keys and values: (rows, heads, tokens, size)."""
    mask: Any
    more: Mapping[str, Any]


@contextmanager
def attended_by(attend: Callable[[Asked], Any]) -> Iterator[None]:
    """Let modules that ask for their attention function call another one."""
    inner = AttentionInterface.get_interface

    def get_interface(registry: AttentionInterface, name: str, default: Callable[..., Any]) -> Any:
        function = inner(registry, name, default)

        def called(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
            return attend(Asked(function, (query, key, value), mask, more))

        return called

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = inner


def stop(asked: Asked) -> NoReturn:
    """End a module that has come to its attention.

    Raises:
        Stopped: Always.
    """
    raise Stopped(asked)
