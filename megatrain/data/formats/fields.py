"""The fields of a row, under whatever names its data set has for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from megatrain.data.row import RowError, kind

MEDIA = ("images", "image", "videos", "video", "audios", "audio")


class Fields:
    """Gives the fields of one row after the other; what had to be repaired in it is noted."""

    def __init__(self, columns: Mapping[str, str], *, is_closed: bool = False) -> None:
        """Make one for rows of a source.

        Args:
            columns: By field, the column that holds it, where it has another name.
            is_closed: Whether fields that are not in `columns` are not in the rows either.
        """
        self.row: Mapping[str, Any] = {}
        self.repairs: list[str] = []
        self.read_columns = set(MEDIA)
        """Of all rows, the columns that were looked at."""
        self.turn_keys: set[str] = set()
        """Of all rows, keys of turns that are left to the chat template."""
        self._columns, self._is_closed = columns, is_closed

    def take(self, row: Mapping[str, Any]) -> None:
        """Go on to another row."""
        self.row, self.repairs = row, []

    def column(self, field: str) -> str:
        """Return the column that holds a field."""
        return self._columns.get(field, field)

    def get(self, field: str) -> Any:
        """Return a field; None: the row has none."""
        if self._is_closed and field not in self._columns:
            return None
        column = self.column(field)
        self.read_columns.add(column)
        return self.row.get(column)

    def media(self) -> str:
        """Return the first column that holds images, video or sound; empty: none does."""
        names = {self._columns[field] for field in MEDIA if field in self._columns} or MEDIA
        return next((name for name in names if self.row.get(name)), "")

    def text(self, field: str) -> str:
        """Return a field that must be text.

        Raises:
            RowError: It is missing, or something else.
        """
        value = self.get(field)
        if value is None:
            raise self.missing(field)
        return self.as_text(value, f'column "{self.column(field)}"')

    def optional_text(self, field: str) -> str:
        """Return a field of text; empty if it is missing."""
        return "" if self.get(field) is None else self.text(field)

    def missing(self, field: str) -> RowError:
        """Return the error of a row without a field."""
        name = self.column(field)
        if name in self.row:
            return RowError(f'column "{name}" holds null', f'column "{name}" holds null, not text')
        columns = ", ".join(map(str, self.row)) or "none"
        ways = "" if self._is_closed else f"; name it with data.columns='{{{field}: COLUMN}}'"
        return RowError(f'no column "{name}"', f'no column "{name}"; the columns are {columns}{ways}')

    def absent(self) -> str | None:
        """Return the first field, other than raw text, whose column the row lacks; None: there is none."""
        fields = (field for field in self._columns if field != "text")
        return next((field for field in fields if self._columns[field] not in self.row), None)

    def as_text(self, value: Any, what: str) -> str:
        """Return a value as text; a number is written out, as JSON has it.

        Raises:
            RowError: It is neither, or text that is not Unicode.
        """
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            self.repairs.append("a number taken as text")
            return json.dumps(value)
        return unicode_text(value, what)

    def as_list(self, value: Any, what: str) -> list[Any]:
        """Return a value as a list; JSON text of one, as CSV files have it, is parsed.

        Raises:
            RowError: It is something else.
        """
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = parse(value, what)
            self.repairs.append("a list taken from JSON text")
        if not isinstance(value, list):
            raise RowError(f"{what} is not a list", f"{what} holds {kind(value)}, not a list")
        return value


def unicode_text(value: Any, what: str) -> str:
    """Return text that can be encoded.

    Raises:
        RowError: It is something else.
    """
    if not isinstance(value, str):
        raise RowError(f"{what} is not text", f"{what} holds {_kind(value)}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            reason = f"{what} holds half a surrogate pair"
            raise RowError(reason, f"{reason}, not text") from error
    return value


def _kind(value: Any) -> str:
    return "NaN" if isinstance(value, float) and math.isnan(value) else kind(value)


def parse(text: str, what: str) -> Any:
    """Parse JSON inside a row.

    Raises:
        RowError: It is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} is not valid JSON", f"{what} is not valid JSON ({error})") from error
