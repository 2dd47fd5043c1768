"""Key-value caches in training: a layer must find them as they were when the model's forward began."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from transformers import Cache


def with_own_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a block key-value caches of its own, as they were when the model's forward began.

    The model then takes the same code path as a resident one, a recomputation does not append twice, and no
    key or value outlives its block.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache):
            break
    else:  # as in most calls
        return args, kwargs
    args = tuple(_own_cache(value) if isinstance(value, Cache) else value for value in args)
    return args, {
        key: _own_cache(value) if isinstance(value, Cache) else value for key, value in kwargs.items()
    }


def _own_cache(held: Any) -> Any:
    """Copy a cache's structure, its layers and their containers, but no tensor."""
    if isinstance(held, (list, tuple)):
        return type(held)(map(_own_cache, held))
    if isinstance(held, dict):
        return {key: _own_cache(value) for key, value in held.items()}
    if not _is_part_of_cache(held.__class__):
        return held
    own = copy.copy(held)
    vars(own).update({name: _own_cache(value) for name, value in vars(held).items()})
    return own


@cache
def _is_part_of_cache(kind: type) -> bool:
    """Whether objects of a class are caches, or layers of one."""
    return any(base.__module__ == Cache.__module__ for base in kind.__mro__)
