"""A row as it was read, or the reason why it cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EMPTY_TEXT = "the text is empty"
"""The reason that counts rows with nothing to train on."""


class RowError(Exception):
    """The reason why a row cannot be used.

    Args:
        reason: The reason, in the same words for all rows with this fault, since they are counted by it.
        detail: The fault of this particular row, in other words.
        more: The words about this particular row that follow the reason, in the place of a detail.
        is_fault: Whether something is wrong; False for an empty document, which has nothing to train on.
    """

    def __init__(self, reason: str, detail: str = "", *, more: str = "", is_fault: bool = True) -> None:
        self.reason, self.detail = reason, detail or reason + more
        super().__init__(self.detail)
        self.is_fault = is_fault


@dataclass(frozen=True, slots=True)
class Row:
    """A row as a reader yields it."""

    number: int
    """The line or row in its file, counted from 1."""
    value: Mapping[str, Any] | RowError
    """The values by column, or the error of a row that could not be read."""
    unit: str = "row"
    """The unit of `number`: `line` or `row`."""


def kind(value: object) -> str:
    """Return the kind of a value, in the words of JSON."""
    kinds = {str: "a string", int: "a number", float: "a number", bool: "true or false", list: "a list"}
    kinds |= {dict: "an object", type(None): "null"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")
