"""Readers of rows that are conversations: turns, and instructions with their answers."""

from __future__ import annotations

from typing import Any

from megatrain.data.example import ChatExample, CompletionExample, Message, Source, TextExample
from megatrain.data.formats.fields import Fields, parse, unicode_text
from megatrain.data.formats.turns import Spelling, tools_of
from megatrain.data.row import EMPTY_TEXT, RowError, kind


def text(fields: Fields, place: Source) -> list[TextExample]:
    """Read raw text, all of which is trained on."""
    value = fields.get("text")
    if value is None:
        raise _no_text(fields)
    document = unicode_text(value, fields.name_of("text"))
    if not document.strip():
        raise RowError(EMPTY_TEXT, is_fault=False)
    return [TextExample(source=place, text=document)]


def _no_text(fields: Fields) -> RowError:
    """Return the error of a row without raw text; rows of an unknown format are read as raw text."""
    absent = fields.absent()
    if absent is not None:
        return fields.missing(absent)
    if fields.column("text") in fields.row:
        return fields.missing("text")
    return RowError(
        f"there is no {fields.name_of('text')}",
        more=f"; the columns are {fields.names}; choose one with data.text_column, or those of instructions "
        "and answers with data.columns='{instruction: COLUMN, output: COLUMN}'",
    )


def conversation(fields: Fields, place: Source, spelling: Spelling) -> list[ChatExample]:
    """Read a conversation given as turns."""
    messages = turns_of(fields, spelling)
    check_answered(messages)
    return [ChatExample(source=place, messages=messages, **extras_of(fields))]


def turns_of(fields: Fields, spelling: Spelling) -> tuple[Message, ...]:
    """Return the turns of a row, with its system prompt in front if that has its own column."""
    value = fields.get("messages")
    if value is None:
        raise fields.missing("messages")
    messages = spelling.messages(value, fields, fields.name_of("messages"))
    return (*(system_of(fields) if messages[0].role != "system" else ()), *messages)


def check_answered(messages: tuple[Message, ...]) -> None:
    """Check that there is something to train on.

    Raises:
        RowError: The assistant says nothing.
    """
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        raise RowError("the assistant has no turn")
    if not any(message.content.strip() or message.tool_calls for message in answers):
        raise RowError("the assistant says nothing")


def system_of(fields: Fields) -> tuple[Message, ...]:
    """Return the system prompt of a row that has a column for it."""
    system = fields.optional_text("system")
    return (Message(role="system", content=system),) if system else ()


def instruction_of(fields: Fields) -> tuple[Message, ...]:
    """Return system prompt, history and instruction of a row, as LLaMA-Factory joins them.

    Raises:
        RowError: The row has no instruction.
    """
    messages = list(system_of(fields))
    for pair in fields.as_list(fields.get("history") or [], fields.name_of("history")):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError("the history is not pairs of turns")
        for role, turn in zip(("user", "assistant"), pair, strict=True):
            messages.append(Message(role=role, content=fields.as_text(turn, "a turn of the history")))
    parts = [part for part in (fields.text("instruction"), fields.optional_text("input")) if part]
    if not any(part.strip() for part in parts):
        raise RowError("the instruction is empty")
    return (*messages, Message(role="user", content="\n".join(parts)))


def alpaca(fields: Fields, place: Source, spelling: Spelling) -> list[ChatExample]:
    """Read an instruction with its answer, or with several in `instances` (self-instruct)."""
    for name in ("instruction", "output"):
        value = fields.get(name)
        if value is not None and spelling.is_of_turns(spelling.parsed(value, fields, f'column "{name}"')):
            raise RowError(
                f"{fields.name_of(name)} holds turns, not text",
                more="; use data.format=prompt_completion, and say with data.columns in which columns prompt "
                "and completion are",
            )
    instances = fields.row.get("instances")
    if isinstance(instances, list) and fields.get("output") is None:
        return [_answered(fields, place, one) for one in instances] or _refuse_no_instance()
    return [_answered(fields, place, None)]


def _refuse_no_instance() -> list[ChatExample]:
    raise RowError("the instruction has no instances")


def _answered(fields: Fields, place: Source, instance: Any) -> ChatExample:
    row = fields.row
    if instance is not None:
        if not isinstance(instance, dict):
            raise RowError("an instance is not an object")
        fields.row = {**row, **instance}
    try:
        messages = instruction_of(fields)
        answer = fields.text("output")
        tools = tools_of(fields)
    finally:
        fields.row = row
    if not answer.strip():
        raise RowError("the answer is empty", f"{fields.name_of('output')} is empty")
    messages = (*messages, Message(role="assistant", content=answer))
    return ChatExample(source=place, messages=messages, tools=tools, options=options_of(fields))


def prompt_completion(
    fields: Fields, place: Source, spelling: Spelling
) -> list[CompletionExample] | list[ChatExample]:
    """Read a prompt and its completion: plain text, or turns if either is turns."""
    prompt, completion = (value_or_turns(fields, spelling, name) for name in ("prompt", "completion"))
    if not (spelling.is_of_turns(prompt) or spelling.is_of_turns(completion)):
        end = fields.as_text(completion, fields.name_of("completion"))
        if not end.strip():
            raise RowError("the completion is empty", f'column "{fields.column("completion")}" is empty')
        start = fields.as_text(prompt, fields.name_of("prompt"))
        return [CompletionExample(source=place, prompt=start, completion=end)]
    asked = side(prompt, "user", fields, spelling, "prompt")
    answer = side(completion, "assistant", fields, spelling, "completion")
    check_answered(answer)
    return [ChatExample(source=place, messages=(*asked, *answer), num_prompt=len(asked), **extras_of(fields))]


def value_or_turns(fields: Fields, spelling: Spelling, name: str) -> Any:
    """Return a required field, parsed if it is JSON text of turns."""
    value = fields.get(name)
    if value is None:
        raise fields.missing(name)
    return spelling.parsed(value, fields, fields.name_of(name))


def side(value: Any, role: str, fields: Fields, spelling: Spelling, field: str) -> tuple[Message, ...]:
    """Return turns as they are, and text as a single turn of `role`."""
    what = fields.name_of(field)
    if isinstance(value, str):
        return (Message(role=role, content=fields.as_text(value, what)),)
    return spelling.messages(value, fields, what)


_RENDERED_WITH = ("messages", "tools", "add_generation_prompt")
"""The template variables that this project sets itself."""


def extras_of(fields: Fields) -> dict[str, Any]:
    """Return what a row gives a chat template beside messages, by its name in an example.

    Raises:
        RowError: The tools or the options are malformed.
    """
    return {"tools": tools_of(fields), "options": options_of(fields)}


def options_of(fields: Fields) -> dict[str, Any]:
    """Return the other variables of the chat template that a row gives, as TRL's rows do.

    Raises:
        RowError: The value of the field is no mapping of variables.
    """
    what = fields.name_of("chat_template_kwargs")
    value = fields.get("chat_template_kwargs")
    options = parse(value, what) if isinstance(value, str) and value.strip() else value or {}
    if not isinstance(options, dict):
        raise RowError(f"{what} is not an object", f"{what} holds {kind(options)}, not an object")
    taken = next((name for name in _RENDERED_WITH if name in options), None)
    if taken is not None:
        raise RowError(f"{what} gives {taken}", more=", which the row has a column for")
    return options
