"""Rendering of chat templates with the origin of each character: its message, and the value that it repeats.

A template is compiled twice. Unchanged, it gives the text that transformers gives, with the sandbox, filters
and functions of transformers. The second time it is rewritten so that each piece carries the message that it
is written for (`naming`), and the messages hold traced strings, which carry that message and their own origin
through captured blocks, macros and filters (`traced`). The two texts are compared each time, and must be
equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from megatrain.data.tokens.naming import Owned, name_owners
from megatrain.data.tokens.traced import Runs, Traced, runs_of
from megatrain.errors import ConfigError

Span = tuple[int, int]


class RenderError(Exception):
    """A template cannot render these messages, or the origin of its text is unknown."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a template, in plain values."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other variables of the template, such as `enable_thinking`."""

    def before(self, number: int) -> Conversation:
        """Return the conversation before a message."""
        return replace(self, messages=self.messages[:number])


class Value(NamedTuple):
    """A string in a message."""

    message: int
    path: tuple[str | int, ...]
    """The keys and indices from the message to the string: `("tool_calls", 0, "function", "name")`."""


class Piece(NamedTuple):
    """Characters of a text that have one origin."""

    start: int
    end: int
    message: int | None
    """The message for which they were written, or None."""
    is_generated: bool
    """Whether they were written inside of `{% generation %}`."""
    value: Value | None
    """The string that they repeat; None if they are the template's own."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    pieces: Sequence[Piece]
    """The pieces of the whole text, in order."""
    written: Mapping[int, Sequence[Piece]]
    """The pieces that were written for each message."""

    def spans(self, message: int, *, generated_only: bool = False) -> list[Span]:
        """Return the text of a message as spans that do not touch each other."""
        spans: list[Span] = []
        for piece in self.written.get(message, ()):
            if piece.is_generated or not generated_only:
                start = spans.pop()[0] if spans and spans[-1][1] == piece.start else piece.start
                spans.append((start, piece.end))
        return spans

    def text_of(self, message: int) -> str:
        """Return the text of a message in one piece."""
        return "".join(self.text[piece.start : piece.end] for piece in self.written.get(message, ()))

    def repeated(self, message: int, *keys: str) -> list[Piece]:
        """Return the pieces of a message that repeat what it holds under one of these keys."""
        return [
            piece
            for piece in self.written.get(message, ())
            if piece.value is not None and piece.value.message == message and piece.value.path[0] in keys
        ]


class Rendering:
    """A chat template, compiled unchanged and with names of owners."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any], day: date) -> None:
        """Compile a template.

        Args:
            source: The template's source.
            special_tokens: The special tokens that it may name, such as `bos_token`.
            day: The date whose midnight is the time that `strftime_now` writes.

        Raises:
            ConfigError: The source is no template.
        """
        try:
            self._plain = _compile_jinja_template(source)
            self._named, self.has_generation = name_owners(self._plain.environment, source)
        except TemplateError as error:
            raise ConfigError(
                f"the chat template cannot be read: {error}; check data.chat_template"
            ) from error
        self.source = source
        self._variables = {**special_tokens, "strftime_now": datetime.combine(day, time()).strftime}
        self.bos, self.eos = (str(special_tokens.get(name) or "") for name in ("bos_token", "eos_token"))

    def text(self, conversation: Conversation, *, prompts: bool = False) -> str:
        """Render as transformers does.

        Args:
            conversation: The conversation in plain values.
            prompts: Whether the template begins the assistant's next turn.

        Raises:
            RenderError: The template refuses the messages.
        """
        return self._render(self._plain, conversation, prompts=prompts)

    def render(self, conversation: Conversation) -> Rendered:
        """Render, and return the origin of each character.

        Raises:
            RenderError: The template refuses the messages, or writes another text where it is traced.
        """
        text = self.text(conversation)
        messages, values = _traced_messages(conversation.messages)
        traced = self._render(self._named, replace(conversation, messages=messages))
        if traced != text:
            raise RenderError("the chat template writes another text where it is told whose text it writes")
        pieces, written = _pieces(runs_of(traced), values), defaultdict(list)
        for piece in pieces:
            if piece.message is not None:
                written[piece.message].append(piece)
        return Rendered(text, pieces, written)

    def _render(self, template: Any, given: Conversation, *, prompts: bool = False) -> str:
        variables = {**self._variables, **given.options}
        variables |= {"messages": given.messages, "tools": given.tools, "add_generation_prompt": prompts}
        try:
            text: str = template.render({"documents": None, **variables})
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RenderError(f"the chat template refuses it ({reason})") from error
        return text


# -- traces ----------------------------------------------------------------------------------------------


def _traced_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Owned], list[Value]]:
    """Return messages whose strings are traced, and the values that the numbers from 1 on stand for."""
    found, values = [], [_NO_VALUE]
    for number, message in enumerate(messages):
        found.append(Owned({key: _traced(value, values, number, (key,)) for key, value in message.items()}))
        found[-1].owner = 2 * number + 2
    return found, values


_NO_VALUE = Value(-1, ())
"""The placeholder for value 0, which stands for no value."""


def _traced(value: Any, values: list[Value], number: int, path: tuple[str | int, ...]) -> Any:
    """Return a part of a message with its strings traced; each is added to `values`."""
    if isinstance(value, str):
        values.append(Value(number, path))
        return Traced(value, ((len(value), 0, len(values) - 1),))
    if isinstance(value, Mapping):
        return {key: _traced(inner, values, number, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_traced(inner, values, number, (*path, place)) for place, inner in enumerate(value)]
    return value


def _pieces(runs: Runs, values: Sequence[Value]) -> list[Piece]:
    """Return the pieces of a text; neighbours of one origin are merged."""
    pieces: list[Piece] = []
    start = end = 0
    last: tuple[int, int] | None = None

    def close() -> None:
        if last is not None and end > start:
            owner, value = last
            message = owner // 2 - 1 if owner > 1 else None
            pieces.append(Piece(start, end, message, bool(owner % 2), values[value] if value else None))

    for length, owner, value in runs:
        if last != (owner, value):
            close()
            start, last = end, (owner, value)
        end += length
    close()
    return pieces
