"""Key-value caches in training: a layer must find them as they were when the model's forward began."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


def with_own_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a block key-value caches of its own, as they were when the model's forward began.

    The model then takes the same code path as a resident one, a recomputation does not append twice, and no
    key or value outlives its block.
    """
    given = (*args, *kwargs.values())
    for value in given:
        if isinstance(value, Cache):
            break
    else:  # as in most calls
        return args, kwargs
    device = torch.device("cpu")
    for value in given:
        if isinstance(value, Tensor):
            device = value.device
            break
    args = tuple([_own_cache(value, device) if isinstance(value, Cache) else value for value in args])
    return args, {
        key: _own_cache(value, device) if isinstance(value, Cache) else value for key, value in kwargs.items()
    }


class _OwnParts(list[Any]):
    """The parts of a cache, one per layer, each copied when it is first asked for: a layer uses its own."""

    def __init__(self, held: list[Any], device: torch.device) -> None:
        super().__init__(held)
        self._held = {id(part): part for part in held}
        self._device = device

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return [self[number] for number in range(*key.indices(len(self)))]
        found = super().__getitem__(key)
        if id(found) in self._held:
            found = self[key] = _own_cache(found, self._device)
        return found

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))


def _own_cache(held: Any, device: torch.device) -> Any:
    """Copy a cache's structure, its layers and their containers, but no tensor."""
    kind = held.__class__
    if kind is list and held and _is_part_of_cache(held[0].__class__):
        return _OwnParts(held, device)
    if isinstance(held, (list, tuple)):
        return kind([_own_cache(value, device) for value in held])
    if isinstance(held, dict):
        return {key: _own_cache(value, device) for key, value in held.items()}
    if not _is_part_of_cache(kind):
        return held
    own = copy.copy(held)
    fields = vars(own)
    for name, value in fields.items():
        if isinstance(value, (list, tuple, dict)) or _is_part_of_cache(value.__class__):
            fields[name] = _own_cache(value, device)
    if isinstance(fields.get(_WINDOW), Tensor):
        setattr(own, _WINDOW, _window_on(device, held.sliding_window))
    return own


_WINDOW = "_sliding_window_tensor"
"""The attribute in which a cache of sliding keys has its window as a tensor. A cache takes it to the device
with its first keys: the launching thread would wait for that copy, in every layer."""


@cache
def _window_on(device: torch.device, window: int) -> Tensor:
    """Return a window on a device, which is waited for once."""
    return torch.tensor(window, dtype=torch.long).to(device)


@cache
def _is_part_of_cache(kind: type) -> bool:
    """Whether objects of a class are caches, or layers of one."""
    return any(base.__module__ == Cache.__module__ for base in kind.__mro__)
