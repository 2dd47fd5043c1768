"""The form of an example between the readers and the tokenizer, whatever format its row came in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatrain.objective.rows import MARKED, PAIRS, TEXTS, RowKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation, in OpenAI's terms."""

    role: str
    """The role: `system`, `user`, `assistant` or `tool`."""
    content: str
    parts: tuple[str, ...] = ()
    """The content as typed parts, for templates that take them; empty if it came as one text."""
    reasoning: str | None = None
    """The assistant's reasoning before its answer, for templates that show it."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """The calls: `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, perhaps with `id`."""
    name: str | None = None
    """The name of the tool that answers, or of another speaker."""
    tool_call_id: str | None = None
    """The id of the call that this message answers."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the turn for templates that read them, such as `tool_plan` and `channel`."""
    loss_weight: float | None = None
    """The weight in the loss: 1 trains on this message, 0 does not; None follows the settings."""


Turns = str | tuple[Message, ...]
"""A part of an example: text that is taken as it is, or turns that a chat template renders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The place that an example came from."""

    file: str
    row: int
    """The line of a `.jsonl` or `.csv` file, or the row of another file, counted from 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.row}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextExample:
    """A document: all of it is trained on."""

    rows: ClassVar[RowKind] = TEXTS
    source: Source
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatExample:
    """A conversation, rendered by the chat template."""

    rows: ClassVar[RowKind] = TEXTS
    source: Source
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other variables of the chat template, such as `enable_thinking`."""
    num_prompt: int = 0
    """The number of first messages that are a prompt; the others are its completion. 0 means unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionExample:
    """A prompt and what should follow it, as plain text without a template."""

    rows: ClassVar[RowKind] = TEXTS
    source: Source
    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A prompt, and what a chat template is given with it."""

    source: Source
    prompt: Turns
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceExample(_Asked):
    """Two answers to a prompt, of which one is better."""

    rows: ClassVar[RowKind] = PAIRS
    is_good: ClassVar[bool] = False
    chosen: Turns
    rejected: Turns

    @property
    def answers(self) -> tuple[Turns, ...]:
        """Return the better answer and the other one."""
        return self.chosen, self.rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class KtoExample(_Asked):
    """An answer to a prompt, and whether it is a good one."""

    rows: ClassVar[RowKind] = MARKED
    completion: Turns
    is_good: bool

    @property
    def answers(self) -> tuple[Turns, ...]:
        """Return the one answer."""
        return (self.completion,)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensExample:
    """A row that is tokenised already."""

    rows: ClassVar[RowKind] = TEXTS
    source: Source
    input_ids: tuple[int, ...]
    labels: tuple[int, ...] | None = None
    """The labels, -100 where nothing is trained; None trains on every token."""


JudgedExample = PreferenceExample | KtoExample
Example = TextExample | ChatExample | CompletionExample | JudgedExample | TokensExample


def texts_of(example: Example) -> Iterator[str]:
    """Yield all texts of an example; a tokenised example has none."""
    parts: tuple[Turns, ...] = ()
    if isinstance(example, TextExample):
        parts = (example.text,)
    elif isinstance(example, ChatExample):
        parts = (example.messages,)
    elif isinstance(example, CompletionExample):
        parts = (example.prompt, example.completion)
    elif not isinstance(example, TokensExample):
        parts = (example.prompt, *example.answers)
    for part in parts:
        yield from [part] if isinstance(part, str) else [message.content for message in part]
