"""A row as it was read, or what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class RowError(Exception):
    """Why a row cannot be used.

    Args:
        reason: The same words for all rows with this fault, since they are counted by it.
        detail: What is wrong with this one.
        is_fault: False where there is nothing wrong, but nothing to train on either: an empty document.
    """

    def __init__(self, reason: str, detail: str = "", *, is_fault: bool = True) -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail or reason
        self.is_fault = is_fault


@dataclass(frozen=True, slots=True)
class Row:
    """What a reader yields."""

    number: int
    """Line or row in its file, from 1."""
    value: Mapping[str, Any] | RowError
    """By column; the error of a row that could not be read."""
    unit: str = "row"
    """`line` where `number` is one."""
    end: int = 0
    """Bytes of the file up to the end of this row, for going on behind it; 0: not known."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where to go on in a file."""

    number: int = 0
    """Of the last row that is not read again."""
    end: int = 0
    """As in `Row`."""


def kind(value: object) -> str:
    """Say what a value is, in the words of JSON."""
    kinds = {str: "a string", int: "a number", float: "a number", bool: "true or false", list: "a list"}
    kinds |= {dict: "an object", type(None): "null"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")
