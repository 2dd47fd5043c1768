"""What a row of data says, whatever format it came in: the one form between readers and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatrain.objective.rows import MARKED, PAIRS, TEXTS, RowKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation, in OpenAI's terms."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    parts: tuple[str, ...] = ()
    """The content as typed parts, for templates that take them; empty: it came whole."""
    reasoning: str | None = None
    """What the assistant thought before it answered, for templates that show it."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Each `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, its `id` if it has one."""
    name: str | None = None
    """Of the tool that answers, or of another who speaks."""
    tool_call_id: str | None = None
    """Of the call that it answers."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else the turn holds, for templates that read it: `tool_plan`, `channel`."""
    loss_weight: float | None = None
    """1 trains on this message, 0 does not; None: as the settings say for its role."""


Turns = str | tuple[Message, ...]
"""A part of an example: text that is taken as it is, or turns that a chat template renders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where an example came from."""

    file: str
    row: int
    """Line of a `.jsonl` or `.csv` file, row of another, from 1."""

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
    """So many of the first messages are a prompt, and the others its completion; 0: nothing says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionExample:
    """A prompt and what should follow it, as plain text without a template."""

    rows: ClassVar[RowKind] = TEXTS
    source: Source
    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceExample:
    """Two answers to a prompt, of which one is better."""

    rows: ClassVar[RowKind] = PAIRS
    is_good: ClassVar[bool] = False
    source: Source
    prompt: Turns
    chosen: Turns
    rejected: Turns
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> tuple[Turns, ...]:
        """The better answer, and the other one."""
        return self.chosen, self.rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class KtoExample:
    """An answer to a prompt, and whether it is a good one."""

    rows: ClassVar[RowKind] = MARKED
    source: Source
    prompt: Turns
    completion: Turns
    is_good: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> tuple[Turns, ...]:
        """The one answer."""
        return (self.completion,)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensExample:
    """A row that is tokenised already."""

    rows: ClassVar[RowKind] = TEXTS
    source: Source
    input_ids: tuple[int, ...]
    labels: tuple[int, ...] | None = None
    """-100 where nothing is trained; None: everywhere."""


JudgedExample = PreferenceExample | KtoExample
Example = TextExample | ChatExample | CompletionExample | JudgedExample | TokensExample


def texts_of(example: Example) -> Iterator[str]:
    """Yield all that an example says, in words; nothing of one that is tokenised already."""
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
