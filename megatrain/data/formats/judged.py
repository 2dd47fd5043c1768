"""Readers of judged rows: two answers of which one is better (DPO), or one that is good or not (KTO)."""

from __future__ import annotations

from typing import Any

from megatrain.data.example import KtoExample, Message, PreferenceExample, Source, Turns
from megatrain.data.formats.chat import extras_of, instruction_of, side, system_of, turns_of, value_or_turns
from megatrain.data.formats.fields import Fields
from megatrain.data.formats.turns import Spelling
from megatrain.data.row import RowError, kind


def preference(fields: Fields, place: Source, spelling: Spelling) -> list[PreferenceExample]:
    """Read a prompt, the chosen and the rejected answer.

    The prompt is a column of text or turns, a conversation up to the answer, an instruction, or the common
    beginning of both answers. The example stays plain text only if all three are text.
    """
    chosen, rejected = (value_or_turns(fields, spelling, name) for name in ("chosen", "rejected"))
    prompt: Turns
    good: Turns
    bad: Turns
    if _is_whole(chosen, spelling) and _is_whole(rejected, spelling):
        shared, good, bad = _common_start(
            side(chosen, "assistant", fields, spelling, "chosen"),
            side(rejected, "assistant", fields, spelling, "rejected"),
        )
        prompt = shared if shared and shared[0].role == "system" else (*system_of(fields), *shared)
    elif (asked := _prompt(fields, spelling)) is not None:
        prompt = asked
        if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
            good, bad = fields.text("chosen"), fields.text("rejected")
        else:
            if isinstance(prompt, str):
                prompt = (*system_of(fields), Message(role="user", content=prompt))
            good = side(chosen, "assistant", fields, spelling, "chosen")
            bad = side(rejected, "assistant", fields, spelling, "rejected")
    elif isinstance(chosen, str) and isinstance(rejected, str):
        prompt, good, bad = _common_text(fields.text("chosen"), fields.text("rejected"))
    else:
        raise fields.missing("prompt")
    if good == bad:
        raise RowError("chosen and rejected are the same")
    for answer, name in ((good, "chosen"), (bad, "rejected")):
        _check_answer(answer, name)
    extras = extras_of(fields)
    return [PreferenceExample(source=place, prompt=prompt, chosen=good, rejected=bad, **extras)]


def _is_whole(value: Any, spelling: Spelling) -> bool:
    """Return whether an answer is a conversation from its beginning."""
    turns = value if isinstance(value, list) else []
    return spelling.is_of_turns(turns) and spelling.role_of(turns[0]) in ("user", "system")


def _prompt(fields: Fields, spelling: Spelling) -> Turns | None:
    if fields.get("prompt") is not None:
        value = value_or_turns(fields, spelling, "prompt")
        if spelling.is_of_turns(value):
            return side(value, "user", fields, spelling, "prompt")
        return fields.text("prompt")
    if fields.get("messages") is not None:
        return turns_of(fields, spelling)
    return instruction_of(fields) if fields.get("instruction") is not None else None


def _common_start(
    chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """Split two conversations into their common beginning and the two rests."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _common_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts into their common beginning and the rests; a space belongs to the word after it."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((at for at, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    if shared and chosen[shared - 1] == " ":
        shared -= 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _check_answer(answer: Turns, name: str) -> None:
    if isinstance(answer, str):
        if not answer.strip():
            raise RowError(f"the {name} answer is empty")
    elif not any(
        message.role == "assistant" and (message.content.strip() or message.tool_calls) for message in answer
    ):
        raise RowError(
            f"the {name} answer is empty", f"{name} has no turn in which the assistant says something"
        )


def kto(fields: Fields, place: Source, spelling: Spelling) -> list[KtoExample]:
    """Read a prompt, an answer and whether it is good.

    Prompt and answer are columns of text or turns, the turns of a conversation of which the last is the
    answer, or an instruction and its output.
    """
    is_good = _label(fields)
    prompt: Turns
    completion: Turns
    if fields.get("prompt") is not None and fields.get("completion") is not None:
        asked, answer = (value_or_turns(fields, spelling, name) for name in ("prompt", "completion"))
        if spelling.is_of_turns(asked) or spelling.is_of_turns(answer):
            prompt = side(asked, "user", fields, spelling, "prompt")
            completion = side(answer, "assistant", fields, spelling, "completion")
        else:
            prompt, completion = fields.text("prompt"), fields.text("completion")
    elif fields.get("messages") is not None:
        messages = turns_of(fields, spelling)
        if messages[-1].role != "assistant":
            raise RowError("the last turn is not the assistant's")
        prompt, completion = messages[:-1], messages[-1:]
    else:
        prompt = instruction_of(fields)
        completion = (Message(role="assistant", content=fields.text("output")),)
    _check_answer(completion, "judged")
    extras = extras_of(fields)
    return [KtoExample(source=place, prompt=prompt, completion=completion, is_good=is_good, **extras)]


def as_label(value: Any) -> bool | None:
    """Return a judgement given as true or false, 1 or 0, or text of either; None if it is no judgement."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, str):
        return words.get(value.strip().lower())
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def _label(fields: Fields) -> bool:
    value = fields.get("label")
    if value is None:
        raise fields.missing("label")
    label = as_label(value)
    if label is None:
        name = fields.name_of("label")
        raise RowError(
            f"{name} is not true or false",
            f"{name} holds {value!r:.40} ({kind(value)}), not true or false",
        )
    if not isinstance(value, bool):
        fields.repairs.append("a judgement was taken from a number or text")
    return label
