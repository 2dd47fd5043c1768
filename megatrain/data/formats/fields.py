"""The fields of a row, whatever names its data set has for them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from megatrain.data.row import RowError, kind

MEDIA = ("images", "image", "videos", "video", "audios", "audio")
NOT_READ = "it has images, video or sound, which are not read"


class Fields:
    """Gives access to the fields of one row after the other, and notes what was repaired in it."""

    def __init__(self, columns: Mapping[str, str], *, is_closed: bool = False) -> None:
        """Make an accessor for the rows of a source.

        Args:
            columns: The column of each field that is stored under another name.
            is_closed: Whether fields that are not in `columns` are absent from the rows.
        """
        self.row: Mapping[str, Any] = {}
        self.repairs: list[str] = []
        self.read_columns = set(MEDIA)
        """The columns that were looked at in any row."""
        self.turn_keys: set[str] = set()
        """The keys of turns, in any row, that are left to the chat template."""
        self._columns, self._is_closed = columns, is_closed

    def take(self, row: Mapping[str, Any]) -> None:
        """Move on to another row."""
        self.row, self.repairs = row, []

    def column(self, field: str) -> str:
        """Return the name of the column that holds a field."""
        return self._columns.get(field, field)

    def name_of(self, field: str) -> str:
        """Return the name of a field in errors: that of its column."""
        return f'column "{self.column(field)}"'

    def get(self, field: str) -> Any:
        """Return the value of a field, or None if the row lacks it."""
        if self._is_closed and field not in self._columns:
            return None
        column = self.column(field)
        self.read_columns.add(column)
        return self.row.get(column)

    def media(self) -> str:
        """Return the first column that holds images, video or sound; empty if none does."""
        names = {self._columns[field] for field in MEDIA if field in self._columns} or MEDIA
        return next((name for name in names if self.row.get(name)), "")

    def text(self, field: str) -> str:
        """Return a field that must be text.

        Raises:
            RowError: The field is missing, or is not text.
        """
        value = self.get(field)
        if value is None:
            raise self.missing(field)
        return self.as_text(value, self.name_of(field))

    def optional_text(self, field: str) -> str:
        """Return a field of text; empty if it is missing."""
        return "" if self.get(field) is None else self.text(field)

    def missing(self, field: str) -> RowError:
        """Return the error of a row that lacks a field."""
        name = self.name_of(field)
        if self.column(field) in self.row:
            return RowError(f"{name} holds null", more=", not text")
        ways = "" if self._is_closed else f"; name it with data.columns='{{{field}: COLUMN}}'"
        return RowError(f"there is no {name}", more=f"; the columns are {self.names}{ways}")

    @property
    def names(self) -> str:
        """Return the columns of the row, as errors list them."""
        return ", ".join(map(str, self.row)) or "none"

    def absent(self) -> str | None:
        """Return the first field, other than raw text, whose column the row lacks; None if it has all."""
        fields = (field for field in self._columns if field != "text")
        return next((field for field in fields if self._columns[field] not in self.row), None)

    def as_text(self, value: Any, what: str) -> str:
        """Return a value as text; a number is written as in JSON.

        Raises:
            RowError: The value is neither text nor a number, or is text that is not Unicode.
        """
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and abs(value) <= sys.float_info.max:  # false for nan, and no conversion of a large int
            self.repairs.append("a number was taken as text")
            return json.dumps(value)
        return unicode_text(value, what)

    def as_list(self, value: Any, what: str) -> list[Any]:
        """Return a value as a list; JSON text of a list, as CSV files have it, is parsed.

        Raises:
            RowError: The value is not a list.
        """
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = parse(value, what)
            self.repairs.append("a list was taken from JSON text")
        if not isinstance(value, list):
            raise RowError(f"{what} is not a list", f"{what} holds {kind(value)}, not a list")
        return value


def unicode_text(value: Any, what: str) -> str:
    """Return text that can be encoded.

    Raises:
        RowError: The value is not text, or cannot be encoded.
    """
    if not isinstance(value, str):
        raise RowError(f"{what} is not text", f"{what} holds {_kind(value)}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(f"{what} holds half a surrogate pair", more=", not text") from error
    return value


def _kind(value: Any) -> str:
    return "NaN" if isinstance(value, float) and math.isnan(value) else kind(value)


def parse(text: str, what: str) -> Any:
    """Parse JSON inside a row.

    Raises:
        RowError: The text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} is not valid JSON", more=f" ({error})") from error
