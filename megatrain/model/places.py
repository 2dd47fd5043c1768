"""Where modules look their parameters up, and how they find other tensors there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Place = tuple[dict[str, nn.Parameter | None], str]
"""A module's own dictionary of parameters, and a key in it."""


def exchange(places: Sequence[Place], tensors: Sequence[Any]) -> list[Any]:
    """Put `tensors` where modules look their parameters up, and return what was there."""
    found = []
    for (held, leaf), tensor in zip(places, tensors, strict=True):
        found.append(held[leaf])
        held[leaf] = tensor
    return found


@contextmanager
def swapped(places: Sequence[Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let modules find `tensors` where their parameters are, for as long as the context lasts.

    It is left through an exception in every recomputation, which ends early.
    """
    parameters = exchange(places, tensors)
    try:
        yield
    finally:
        exchange(places, parameters)
