"""A check for content that a chat template silently drops, so that a model never sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatrain.data.example import ChatExample, Example, JudgedExample, Message
from megatrain.data.tokens.forms import CALLS, SYSTEM, TOOL, TURNS
from megatrain.data.tokens.rendering import RenderError
from megatrain.data.tokens.template import ChatTemplate, TrainOn

_SYSTEM, _TOOLS, _REASONING, _BESIDE_CALLS = (
    "system prompts",
    "tools",
    "reasoning",
    "reasoning beside calls of tools",
)
_PROBES: Mapping[str, tuple[Sequence[Message], Sequence[Mapping[str, Any]], str]] = {
    _SYSTEM: (SYSTEM, (), SYSTEM[0].content),
    _TOOLS: (TURNS, (TOOL,), TOOL["function"]["name"]),
    _REASONING: ((TURNS[0], replace(TURNS[1], reasoning="Juliett")), (), "Juliett"),
    _BESIDE_CALLS: ((CALLS[0], replace(CALLS[1], reasoning="Juliett"), CALLS[2]), (TOOL,), "Juliett"),
}
"""The probe of each kind of content: messages, tools, and a word that a template which takes it writes."""


def held_by(example: Example) -> set[str]:
    """Return the kinds of content of a conversation that chat templates may drop."""
    if not isinstance(example, ChatExample | JudgedExample):
        return set()
    held = {_TOOLS} if example.tools else set()
    for message in _messages(example):
        if message.role == "system" and message.content.strip():
            held.add(_SYSTEM)
        if message.reasoning and message.reasoning.strip():
            held.add(_BESIDE_CALLS if message.tool_calls else _REASONING)
    return held


def _messages(example: ChatExample | JudgedExample) -> Iterator[Message]:
    if isinstance(example, ChatExample):
        yield from example.messages
        return
    for part in (example.prompt, *example.answers):
        if not isinstance(part, str):
            yield from part


def why_left_out(template: ChatTemplate, held: Collection[str]) -> str | None:
    """Return a warning about what a template drops from the data; None if nothing.

    The template renders a short conversation. Content that it refuses is not dropped silently.
    """
    lost = [kind for kind in _PROBES if kind in held and _leaves_out(template, kind)]
    if not lost:
        return None
    return (
        f"the chat template leaves out what the data holds of {' and '.join(lost)}: the model never sees it; "
        "give a template that writes it (data.chat_template)"
    )


def _leaves_out(template: ChatTemplate, kind: str) -> bool:
    messages, tools, word = _PROBES[kind]
    try:
        text, _ = template.spans(messages, tools, TrainOn(everything=True))
    except RenderError:
        return False
    return word not in text
