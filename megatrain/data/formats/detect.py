"""This module detects the format of a source from its columns, and picks the reader of each format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatrain.data.example import Example, Source
from megatrain.data.formats.chat import alpaca, conversation, prompt_completion, text
from megatrain.data.formats.fields import NOT_READ, Fields
from megatrain.data.formats.judged import as_label, kto, preference
from megatrain.data.formats.tokens import tokens
from megatrain.data.formats.turns import Spelling
from megatrain.data.row import RowError

Columns = dict[str, str]
_TURNS = ("messages", "conversations", "conversation")
_ASKED = ("instruction", "question", "query", "prompt", "input", "problem")
_ANSWERED = ("output", "response", "solution", "answer", "completion", "target")
"""Columns of answers. A solution (NuminaMath) stands before an answer, which is only its final number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The format of rows, and the columns that hold its fields."""

    format: str
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    is_closed: bool = False
    """Whether fields outside `columns` are absent from the rows, as in `Fields`."""

    def __str__(self) -> str:
        renamed = [f"{name} in {column}" for name, column in self.columns.items() if name != column]
        return self.format + (f" ({', '.join(renamed)})" if renamed else "")


class Converter:
    """Converts rows to examples by a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.fields = Fields(recipe.columns, is_closed=recipe.is_closed)
        spelling = Spelling(recipe.tags)
        converters: dict[str, Callable[[Fields, Source], Iterable[Example]]] = {
            "text": text,
            "alpaca": partial(alpaca, spelling=spelling),
            "sharegpt": partial(conversation, spelling=spelling),
            "messages": partial(conversation, spelling=spelling),
            "prompt_completion": partial(prompt_completion, spelling=spelling),
            "preference": partial(preference, spelling=spelling),
            "kto": partial(kto, spelling=spelling),
            "tokens": tokens,
        }
        self._convert = converters[recipe.format]

    def examples(self, row: Mapping[str, Any], place: Source) -> list[Example]:
        """Return the examples of a row; `fields.repairs` then says what was repaired in it.

        Raises:
            RowError: The row cannot be used.
        """
        self.fields.take(row)
        media = self.fields.media()
        if media:
            raise RowError(NOT_READ, more=f': column "{media}"')
        return list(self._convert(self.fields, place))


def detect(row: Mapping[str, Any], said: Recipe, *, text_column: str) -> Recipe | None:
    """Detect the format of a row; None means that it is unknown.

    Args:
        row: The row, by column.
        said: The recipe of the settings: a format or `auto`, columns and tags.
        text_column: The column of raw text.
    """
    look = _Look(row, said, text_column)
    if said.format != "auto":
        return look.recipe(said.format, _FINDERS[said.format](look) or {})
    for name, find in _FINDERS.items():
        columns = find(look)
        if columns is not None:
            return look.recipe(look.spelled(columns) if name == "messages" else name, columns)
    return None


class _Look:
    """A row that is searched for the fields of each format."""

    def __init__(self, row: Mapping[str, Any], said: Recipe, text_column: str) -> None:
        self.row, self.said, self.text_column = row, said, text_column
        self._spelling = Spelling(said.tags)

    def recipe(self, name: str, columns: Columns) -> Recipe:
        """Return a recipe, in which columns that the settings name override those that were found."""
        return Recipe(
            format=name,
            columns=columns | dict(self.said.columns),
            tags=self.said.tags,
            is_closed=self.said.is_closed,
        )

    def value(self, name: str) -> Any:
        """Return a field from the column that the settings name, or else from the column of its own name."""
        return self.row.get(self.said.columns.get(name, name))

    def has(self, *names: str) -> bool:
        """Return whether the row has all of these fields."""
        return all(self.value(name) is not None for name in names)

    def first(self, names: Iterable[str], *, but: str = "") -> str | None:
        """Return the first of these columns that the row has."""
        return next((name for name in names if name != but and self.row.get(name) is not None), None)

    def turns(self) -> Columns | None:
        """Return the column of a conversation."""
        if "messages" in self.said.columns:
            return {"messages": self.said.columns["messages"]} if self.has("messages") else None
        for name in _TURNS:
            value = self.row.get(name)
            is_json = isinstance(value, str) and value.lstrip().startswith("[")
            if is_json or (isinstance(value, list) and (not value or self._spelling.is_of_turns(value))):
                return {"messages": name}
        return None

    def asked_and_answered(self) -> Columns | None:
        """Return the columns of an instruction and its output, whatever they are called."""
        said = self.said.columns
        output = said.get("output") if self.has("output") else self.first(_ANSWERED)
        output = output or ("output" if self.has("output") else None)
        asked = said["instruction"] if "instruction" in said and self.has("instruction") else None
        asked = asked or self.first(_ASKED, but=output or "")
        if asked is None or output is None:
            return None
        columns = {"instruction": asked, "output": output}
        # A row that has only input and output has no instruction beside its input.
        return columns | ({"input": "no further input"} if asked == "input" else {})

    def spelled(self, columns: Columns) -> str:
        """Return the name of a conversation's spelling."""
        turns = self.row[columns["messages"]]
        first = turns[0] if isinstance(turns, list) and turns else {}
        return "sharegpt" if isinstance(first, dict) and "from" in first else "messages"


def _find_preference(look: _Look) -> Columns | None:
    if not look.has("chosen", "rejected"):
        return None
    if look.has("prompt"):
        return {}
    asked = look.first(_ASKED)
    return look.turns() or ({"instruction": asked} if asked else {})


def _find_kto(look: _Look) -> Columns | None:
    label = {"label": "kto_tag"} if look.row.get("kto_tag") is not None else {}
    value = look.row.get("kto_tag") if label else look.value("label")
    if as_label(value) is None:
        return None
    if look.has("prompt", "completion"):
        return label
    turns = look.turns()
    if turns:
        return label | turns
    # Classes of instructions are labelled 0 and 1 too, so a number alone is no judgement.
    answered = look.asked_and_answered() if isinstance(value, bool) or label else None
    return label | answered if answered else None


def _find_alpaca(look: _Look) -> Columns | None:
    if look.has("instruction") and isinstance(look.row.get("instances"), list):
        return {}
    return look.asked_and_answered()


def _find_text(look: _Look) -> Columns | None:
    column = look.said.columns.get("text", look.text_column)
    return {"text": column} if look.row.get(column) is not None else None


_FINDERS: dict[str, Callable[[_Look], Columns | None]] = {
    "tokens": lambda look: {} if look.has("input_ids") else None,
    "preference": _find_preference,
    "kto": _find_kto,
    "messages": lambda look: look.turns(),
    "sharegpt": lambda look: look.turns(),
    "prompt_completion": lambda look: {} if look.has("prompt", "completion") else None,
    "alpaca": _find_alpaca,
    "text": _find_text,
}
"""The finders in their order: a judged row has turns too, and a row of turns has text too."""
