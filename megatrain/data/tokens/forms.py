"""The form in which a chat template takes messages: it may write in one form what it drops in another.

Templates of models that see pictures take the content of a message as typed parts, and write nothing of plain
text; some want the arguments of a call as JSON text. The form is found by rendering two or three short
messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatrain.data.example import Message
from megatrain.data.tokens.rendering import Conversation, Rendered, RenderError, Rendering

REASONING = ("reasoning_content", "thinking")
"""The names that templates use for a message's reasoning; all of these keys hold it."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which messages are given to a template."""

    takes_text: bool = True
    """Whether content may be text; otherwise it is always typed parts."""
    part_roles: frozenset[str] = frozenset()
    """The roles whose content may be typed parts: a message that came as parts stays so."""
    arguments_as_text: bool = False
    """Whether arguments of calls are JSON text; otherwise they are objects."""

    def mapping(self, message: Message) -> dict[str, Any]:
        """Return a message as a chat template reads it."""
        found: dict[str, Any] = {"role": message.role, "content": message.content}
        if not self.takes_text or (message.parts and message.role in self.part_roles):
            found["content"] = [{"type": "text", "text": part} for part in message.parts or [message.content]]
        if message.reasoning is not None:
            found |= dict.fromkeys(REASONING, message.reasoning)
        if message.tool_calls:
            found["tool_calls"] = [self._call(call) for call in message.tool_calls]
        for key in ("name", "tool_call_id"):
            if (value := getattr(message, key)) is not None:
                found[key] = value
        return found | {key: plain(value) for key, value in message.more.items() if key not in found}

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = plain(call)
        if self.arguments_as_text:
            function = found["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return found


def plain(value: Any) -> Any:
    """Return JSON's own types, since a template's sandbox knows only their methods."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


TURNS = (Message(role="user", content="Alpha"), Message(role="assistant", content="Bravo"))
CALLS = (
    TURNS[0],
    Message(
        role="assistant",
        content="",
        tool_calls=(
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "Charlie", "arguments": {"Delta": "Echo"}},
            },
        ),
    ),
    Message(role="tool", content="Foxtrot", name="Charlie", tool_call_id="call00001"),
)
SYSTEM = (Message(role="system", content="Golf"), *TURNS)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "Charlie",
        "description": "Hotel",
        "parameters": {
            "type": "object",
            "properties": {"Delta": {"type": "string", "description": "India"}},
            "required": ["Delta"],
        },
    },
}


class Forms:
    """Finds the form of a template, asking each question once, when it is needed."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._part_roles: dict[str, bool] = {}

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Return messages in the form that the template takes."""
        in_parts = {message.role for message in messages if message.parts}
        form = Form(
            takes_text=self._takes_text,
            part_roles=frozenset(role for role in in_parts if self._takes_parts(role)),
            arguments_as_text=any(message.tool_calls for message in messages) and self._arguments_as_text,
        )
        mappings = [form.mapping(message) for message in messages]
        return Conversation(mappings, plain(tools) or None, plain(options or {}))

    @cached_property
    def _takes_text(self) -> bool:
        """Whether content is given as text, as it is to a template that writes neither text nor parts."""
        return self._writes(TURNS, Form()) or not self._writes(TURNS, Form(takes_text=False))

    def _takes_parts(self, role: str) -> bool:
        if role not in self._part_roles:
            turns = {"system": SYSTEM, "tool": CALLS}.get(role, TURNS)
            self._part_roles[role] = self._writes(turns, Form(part_roles=frozenset((role,))), in_parts=True)
        return self._part_roles[role]

    @cached_property
    def _arguments_as_text(self) -> bool:
        as_object, as_text = (
            Form(takes_text=self._takes_text, arguments_as_text=as_text) for as_text in (False, True)
        )
        return not self._writes_calls(as_object) and self._writes_calls(as_text)

    def _writes(self, turns: Sequence[Message], form: Form, *, in_parts: bool = False) -> bool:
        """Return whether the template writes the content of turns, without the names of parts."""
        if in_parts:
            turns = [replace(turn, parts=(turn.content,)) for turn in turns]
        rendered = self._render(turns, form)
        values = (
            [] if rendered is None else [piece.value for piece in rendered.pieces if piece.value is not None]
        )
        written = {value.message for value in values if value.path[0] == "content"}
        is_dumped = any(value.path[-1] == "type" for value in values)
        return not is_dumped and all(number in written for number, turn in enumerate(turns) if turn.content)

    def _writes_calls(self, form: Form) -> bool:
        """Return whether the template writes a call with its arguments."""
        rendered = self._render(CALLS, form)
        written = rendered.text_of(1) if rendered else ""
        return all(word in written for word in ("Charlie", "Delta", "Echo"))

    def _render(self, turns: Sequence[Message], form: Form) -> Rendered | None:
        tools = [TOOL] if any(turn.tool_calls for turn in turns) else None
        try:
            return self._rendering.render(Conversation([form.mapping(turn) for turn in turns], tools))
        except RenderError:
            return None
