"""Reader of turns of conversations in every spelling; they become messages in OpenAI's terms.

Spellings: `role` and `content` (OpenAI), `from` and `value` (sharegpt), others by tags; content as text or as
typed parts (OpenAI's and LLaMA-Factory v1's); tool calls in `tool_calls`, `function_call`, turns of their own
or typed parts; reasoning in `reasoning_content`, `reasoning`, `thinking` or typed parts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from megatrain.data.example import Message
from megatrain.data.formats.fields import NOT_READ, Fields, parse
from megatrain.data.row import RowError, kind

_CALL = "call"
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), _CALL),
}
_TAGS = {
    "system_tag": "system",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": _CALL,
}
_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_WEIGHT_KEYS = ("loss_weight", "weight", "train")
_MEDIA_PARTS = ("image", "video", "audio")
_OF_CALLS = ("tool_calls", "function_call", "tool_call_id", "name")
_LIKE_TURNS = re.compile(
    r"""\s*\[\s*\{.{0,2000}['"](?:role|from)['"]\s*:\s*['"](?:system|user|human|assistant|gpt)['"]""",
    re.DOTALL,
)
"""A list of turns as text: JSON, or Python's repr, which pandas writes into a CSV file."""


class Spelling:
    """The way in which the turns of a source are written."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        own = {tags[name]: role for name, role in _TAGS.items() if name in tags}
        self.roles = {**_ROLES, **own}
        self.role_keys = (tags["role_tag"],) if "role_tag" in tags else _ROLE_KEYS
        self.content_keys = (tags["content_tag"],) if "content_tag" in tags else _CONTENT_KEYS
        own_keys = (*self.role_keys, *self.content_keys)
        self._known = {*own_keys, *_REASONING_KEYS, *_WEIGHT_KEYS, *_OF_CALLS}

    def messages(self, value: Any, fields: Fields, what: str) -> tuple[Message, ...]:
        """Read turns.

        Args:
            value: The turns: a list of them, or a single one.
            fields: The fields of the row, which note what was repaired.
            what: The name of the turns in errors.

        Raises:
            RowError: The value is not turns, or one of the turns is malformed.
        """
        turns = [value] if isinstance(value, dict) else fields.as_list(value, what)
        if not turns:
            raise RowError(f"{what} has no turn")
        names: dict[str, str] = {}
        return tuple(self._message(turn, fields, f"turn {n}", names) for n, turn in enumerate(turns, start=1))

    def parsed(self, value: Any, fields: Fields, what: str) -> Any:
        """Return a value; JSON text of turns, as CSV files have it, is parsed.

        Raises:
            RowError: The text looks like turns, and is not JSON.
        """
        if not isinstance(value, str) or not value.lstrip().startswith("["):
            return value
        try:
            turns = json.loads(value)
        except (ValueError, RecursionError) as error:
            if _LIKE_TURNS.match(value):
                raise RowError(
                    f"{what} holds turns that are not valid JSON",
                    more=f" ({error}); write them with json.dumps",
                ) from error
            return value
        if not self.is_of_turns(turns) or self.role_of(turns[0]) is None:
            return value  # an answer may be JSON too
        fields.repairs.append("a list was taken from JSON text")
        return turns

    def is_of_turns(self, value: Any) -> bool:
        """Return whether a value is a turn or a list of turns."""
        turns = value if isinstance(value, list) else [value]
        return bool(turns) and all(
            isinstance(turn, dict) and any(key in turn for key in self.role_keys) for turn in turns
        )

    def role_of(self, turn: Mapping[str, Any]) -> str | None:
        """Return the role of the speaker in our words; None if it is unknown."""
        spoken = next((turn[key] for key in self.role_keys if key in turn), None)
        return self.roles.get(spoken) if isinstance(spoken, str) else None

    def _message(self, turn: Any, fields: Fields, what: str, names: dict[str, str]) -> Message:
        """Read a turn; `names` maps the id of each call so far to its tool."""
        if not isinstance(turn, dict):
            raise RowError("a turn is not an object", f"{what} is {kind(turn)}, not an object")
        role = self.role_of(turn)
        if role is None:
            spoken = next((turn[key] for key in self.role_keys if key in turn), None)
            known = ", ".join(self.roles)
            raise RowError(
                "a role is not known",
                f"{what}: the role {spoken!r} is not known; known are {known}, and data.tags names others",
            )
        content = next((turn[key] for key in self.content_keys if turn.get(key) is not None), None)
        calls = _calls_of(turn, what)
        names.update({call["id"]: call["function"]["name"] for call in calls if "id" in call})
        reasoning = [fields.as_text(turn[key], what) for key in _REASONING_KEYS if turn.get(key)]
        parts: list[str] = []
        if role == _CALL:
            role, calls, content = "assistant", _calls_in_text(content, what), ""
        if role == "tool" and _is_result(content):
            content = json.dumps(content, ensure_ascii=False)
            fields.repairs.append("what a tool returned was taken as JSON text")
        if isinstance(content, list):
            parts, parts_reasoning, parts_calls = _parts(content, fields, what)
            content, reasoning, calls = "".join(parts), reasoning + parts_reasoning, calls + parts_calls
        if content is None and not calls:
            raise RowError("a turn has no content", f"{what} has no content")
        answered = turn.get("tool_call_id")
        name = turn.get("name") or (names.get(str(answered)) if role == "tool" else None)
        more = {key: value for key, value in turn.items() if key not in self._known and value is not None}
        fields.turn_keys.update(more)
        return Message(
            role=role,
            content="" if content is None else fields.as_text(content, what),
            parts=tuple(parts),
            reasoning="\n".join(reasoning) or None,
            tool_calls=tuple(calls),
            name=str(name) if name else None,
            tool_call_id=str(answered) if answered is not None and role == "tool" else None,
            loss_weight=_weight(turn, what),
            more=more,
        )


def _is_result(content: Any) -> bool:
    """Return whether a tool's result is neither text nor typed parts."""
    parts = content if isinstance(content, list) else []
    return isinstance(content, dict) or any(
        not isinstance(part, str) and not (isinstance(part, dict) and "type" in part) for part in parts
    )


def _parts(parts: list[Any], fields: Fields, what: str) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """Return the texts, the reasoning and the tool calls of typed parts."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        form = part.get("type") if isinstance(part, dict) else None
        if not isinstance(form, str):
            raise RowError("a part has no type", f"{what} has a part without a type")
        if form.startswith(_MEDIA_PARTS) or form.endswith(_MEDIA_PARTS):
            raise RowError(NOT_READ, more=f": {what} has a part of type {form}")
        value = next(
            (part[key] for key in ("value", form, "text", "content") if part.get(key) is not None), ""
        )
        if form == "text":
            texts.append(fields.as_text(value, what))
        elif form in ("reasoning", "thinking"):
            reasoning.append(fields.as_text(value, what))
        elif form in ("tool_call", "function_call"):
            calls += _calls_in_text(value, what)
        else:
            raise RowError("a part has a type that is not known", f"{what} has a part of type {form}")
    return texts, reasoning, calls


def _calls_in_text(value: Any, what: str) -> list[dict[str, Any]]:
    """Read calls in a turn or part of their own: an object, a list of objects, or JSON text of either."""
    calls = parse(value, f"a tool call of {what}") if isinstance(value, str) else value
    return [_call(call, what) for call in (calls if isinstance(calls, list) else [calls])]


def _calls_of(turn: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    calls = turn.get("tool_calls") or turn.get("function_call") or []
    if isinstance(calls, str):
        calls = parse(calls, f"tool_calls of {what}")
    return [_call(call, what) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: Any, what: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise RowError("a tool call has no name", f"{what} has a tool call without a name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = parse(arguments, "arguments of a tool call") if arguments.strip() else {}
    if not isinstance(arguments or {}, dict):
        raise RowError("arguments of a tool call are not an object", f"{what}: {name} has {kind(arguments)}")
    given = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**given, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _weight(turn: Mapping[str, Any], what: str) -> float | None:
    value = next((turn[key] for key in _WEIGHT_KEYS if turn.get(key) is not None), None)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise RowError("a loss weight is not a number from 0", f"{what} has the loss weight {value!r}")
    return float(value)


def tools_of(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a row, each `{"type": "function", "function": {...}}`.

    Raises:
        RowError: The tools are not JSON, or are malformed.
    """
    tools = fields.get("tools")
    if isinstance(tools, str):
        tools = parse(tools, "tools") if tools.strip() else []
    found = []
    for tool in tools if isinstance(tools, list) else [tools] if tools else []:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("a tool has no name")
        found.append({"type": "function", "function": function})
    return tuple(found)
