"""Rotary frequencies that grow with the longest row so far: a row's depend on the rows before it.

transformers' `rope_type: dynamic` keeps the frequencies of the longest row since the last one that fits the
model's first context (`dynamic_rope_update` in transformers/modeling_rope_utils.py). Micro-batches that take
turns begin with the last one. So their frequencies are compared with those of micro-batches in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from megatrain.errors import ModelError

T = TypeVar("T")

_place: ContextVar[int | None] = ContextVar("_place", default=None)
"""Number of the call that is running, among those that take turns; None: it is alone."""


@dataclass(frozen=True, slots=True)
class _Use:
    """One forward of a rotary embedding."""

    place: int
    length: int
    """Tokens of its longest row."""
    cached: int
    """Tokens of the row that its frequencies are of."""


class GrowingFrequencies:
    """The rotary embeddings of a model whose frequencies grow; most models have none."""

    def __init__(self, model: nn.Module) -> None:
        """Watch the forwards of these modules from now on."""
        self._modules = [module for module in model.modules() if _grows(module)]
        self._begin: dict[tuple[int, str], int] = {}
        self._uses: dict[tuple[int, str], list[_Use]] = {}
        self._hooks = [
            hook
            for number, module in enumerate(self._modules)
            for hook in (
                module.register_forward_pre_hook(partial(self._before, number), with_kwargs=True),
                module.register_forward_hook(partial(self._after, number), with_kwargs=True),
            )
        ]

    @property
    def are_there(self) -> bool:
        """Whether the model has such frequencies."""
        return bool(self._modules)

    def remove(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def numbered(self, calls: Sequence[Callable[[], T]]) -> list[Callable[[], T]]:
        """Return the calls of a group, each of which says its number while it runs."""
        self._begin.clear()
        self._uses.clear()
        if not self._modules:
            return [*calls]
        return [partial(_numbered, place, call) for place, call in enumerate(calls)]

    def check(self) -> None:
        """Refuse what a group has computed, if its calls in their order would have had other frequencies.

        Raises:
            ModelError: The frequencies would have been others.
        """
        for (number, kind), uses in self._uses.items():
            original = int(self._modules[number].original_max_seq_len)  # type: ignore[arg-type]
            expected = left = self._begin[number, kind]
            for use in uses:  # as they ran
                left = _grown(left, use.length, original)
            is_same = True
            for use in sorted(uses, key=lambda use: use.place):
                expected = _grown(expected, use.length, original)
                is_same &= expected == use.cached
            if not is_same or left != expected:
                shortest, *_, longest = sorted(use.length for use in uses)
                raise ModelError(
                    "the model's rotary frequencies grow with its rows (rope_type dynamic), so rows of "
                    f"{shortest:,} to {longest:,} tokens in one round would not have those of rows in order; "
                    f"use memory.lockstep=1, or rows of at most {original:,} tokens"
                )

    def _before(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _place.get() is not None:
            kind = _kind(args, kwargs)
            self._begin.setdefault((number, kind), _cached(module, kind))

    def _after(self, number: int, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        place = _place.get()
        if place is not None:
            positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
            kind = _kind(args, kwargs)
            use = _Use(place, int(positions.max()) + 1, _cached(module, kind))
            self._uses.setdefault((number, kind), []).append(use)


def _numbered(place: int, call: Callable[[], T]) -> T:
    token = _place.set(place)
    try:
        return call()
    finally:
        _place.reset(token)


def _grows(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return any("dynamic" in str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


def _kind(args: Any, kwargs: Any) -> str:
    """Return the kind of layer whose frequencies a forward asks for; empty where all have the same."""
    return str((kwargs.get("layer_type") if "layer_type" in kwargs else [*args, None, None, None][2]) or "")


def _cached(module: nn.Module, kind: str) -> int:
    own = getattr(module, f"{kind}_max_seq_len_cached", None) if kind else None
    return int(module.max_seq_len_cached if own is None else own)  # type: ignore[arg-type]


def _grown(cached: int, length: int, original: int) -> int:
    """Return what frequencies are of after a row, as transformers has it."""
    if length < original and cached > original:
        return original
    return max(cached, length)
