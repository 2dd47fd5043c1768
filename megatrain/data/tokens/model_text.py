"""The spans of a text that are the model's own, checked against what the messages say.

An assistant's turn is the text written for its message, without the part that a prompt gives (`headers`). Its
words must be in there, and no other message's may be; otherwise the conversation is refused by name.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from megatrain.data.example import Message
from megatrain.data.tokens.forms import REASONING, TURNS, Forms
from megatrain.data.tokens.headers import Headers
from megatrain.data.tokens.rendering import Conversation, Rendered, RenderError, Rendering, Span

WAYS_OUT = (
    "mark what the model writes with {% generation %} in a template file (data.chat_template), name another "
    "template, or train on all of the text (data.train_on=all)"
)
_OTHER = "give one that writes it (data.chat_template)"
_SAID = ("content", *REASONING, "tool_calls")
"""The keys of what a message says."""

_REASONING_TAGS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_AFTER_REASONING = re.compile(r"\s*(?:</[^<>\s]+>|<\|[^<>\s|]+\|>)?\s*")


class ModelText:
    """Finds the model's own text in what a template has written."""

    def __init__(self, rendering: Rendering) -> None:
        self.rendering = rendering
        self.forms = Forms(rendering)
        self._headers: Headers | None = None

    def spans(
        self,
        conversation: Conversation,
        rendered: Rendered,
        messages: Sequence[Message],
        wanted: Sequence[int],
    ) -> dict[int, list[Span]]:
        """Return the spans that were written for messages, without what is given of them, and check them.

        Args:
            conversation: The conversation that was rendered.
            rendered: The rendered text with its origins.
            messages: The messages of which the conversation was made.
            wanted: The numbers of the messages whose spans are returned.

        Raises:
            RenderError: A span is unknown, a message's words are not in it, or another message's are.
        """
        found = {}
        has_marks = self.rendering.has_generation
        for number in wanted:
            message, spans = messages[number], rendered.spans(number)
            if not spans:
                raise RenderError(
                    f"the chat template writes nothing that is known to be of the {message.role}"
                )
            if message.role != "assistant":
                words = rendered.repeated(number, "content")
                found[number] = less(spans, [(0, words[0].start if words else len(rendered.text))])
                continue
            _check_said(rendered, message, number)
            if has_marks:
                found[number] = rendered.spans(number, generated_only=True)
            else:
                begin = self._begin(conversation, rendered, number)
                found[number] = _ended(rendered, less(spans, [(0, begin)]), self.rendering.eos)
        is_marked = [has_marks and message.role == "assistant" for message in messages]
        _check_apart(rendered, {number for number in wanted if not is_marked[number]})
        return found

    def _begin(self, conversation: Conversation, rendered: Rendered, number: int) -> int:
        if self._headers is None:
            self._headers = Headers(self.rendering, self.forms.conversation(TURNS))
        return self._headers.begin(conversation, rendered, number)

    def check_reasoning(self, conversation: Conversation, rendered: Rendered) -> None:
        """Check that the position of any reasoning that the template has kept is known.

        Raises:
            RenderError: The position is unknown.
        """
        lost = {
            number
            for number, message in enumerate(conversation.messages)
            if any(message.get(key) for key in REASONING) and not rendered.repeated(number, *REASONING)
        }
        if not lost:
            return
        messages = [
            {key: value for key, value in message.items() if number not in lost or key not in REASONING}
            for number, message in enumerate(conversation.messages)
        ]
        if self.rendering.text(replace(conversation, messages=messages)) != rendered.text:
            raise RenderError(
                "it is not known where the chat template writes the reasoning, which is not trained on"
            )


def reasoning_in(rendered: Rendered, number: int, part: Span) -> list[Span]:
    """Return the spans of an assistant's reasoning, with the tags around it, in the text of its message."""
    text, (start, end) = rendered.text, part
    cuts = [found.span() for found in _REASONING_TAGS.finditer(text, start, end)]
    for piece in rendered.repeated(number, *REASONING):
        if start <= piece.start and piece.end <= end and not any(a <= piece.start < b for a, b in cuts):
            after = _AFTER_REASONING.match(text, piece.end, end)
            assert after is not None
            cuts.append((start, after.end()))
    return cuts


def less(parts: Iterable[Span], cuts: Iterable[Span]) -> list[Span]:
    """Return the spans without the cuts."""
    left = list(parts)
    for start, end in cuts:
        pieces = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, end), b))]
        left = [(a, b) for a, b in pieces if a < b]
    return left


def _ended(rendered: Rendered, spans: list[Span], eos: str) -> list[Span]:
    """Return spans of a message without a trailing space, but with the end-of-text token that ends it.

    The space is a part of the next message's first token (Llava). An end-of-text token behind all messages
    ends the last of them (Phi 3).
    """
    if not spans:
        return spans
    last, (start, end) = rendered.pieces[-1], spans[-1]
    if last.message is None and last.start == end and eos and rendered.text[end:].strip() == eos:
        return [*spans[:-1], (start, last.end)]
    ending = rendered.pieces[bisect_left(rendered.pieces, end, key=lambda piece: piece.end)]
    is_template_s = ending.value is None or ending.end != end
    return less(spans, [(end - 1, end)]) if is_template_s and rendered.text[end - 1] == " " else spans


def _check_said(rendered: Rendered, message: Message, number: int) -> None:
    """Check that the words of an assistant's message are in what was written for it.

    Reasoning may be left out, as Qwen 3 does with that of earlier turns.

    Raises:
        RenderError: The words are missing.
    """
    pieces = rendered.written[number]
    paths = [piece.value.path for piece in pieces if piece.value and piece.value.message == number]
    rest = "".join(rendered.text[piece.start : piece.end] for piece in pieces if piece.value is None)

    def is_there(text: str, *path: str | int) -> bool:
        found = any(other[: len(path)] == path for other in paths)  # otherwise their trace was lost
        return found or not text or bool(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", rest))

    if not is_there(message.content.strip(), "content"):
        beside = " beside a call" if message.tool_calls else ""
        raise RenderError(f"the chat template leaves out what the assistant says{beside}; {_OTHER}")
    for place, call in enumerate(message.tool_calls):
        if not is_there(call["function"]["name"], "tool_calls", place, "function", "name"):
            raise RenderError(f"the chat template leaves out a call of a tool; {_OTHER}")


def _check_apart(rendered: Rendered, trained: Collection[int]) -> None:
    """Check that the text of each message holds its own words, and none of another message.

    Raises:
        RenderError: Words of one of `trained` are elsewhere, or words of another message are among them.
    """
    for piece in rendered.pieces:
        if piece.value is None or piece.value.path[0] not in _SAID or piece.message == piece.value.message:
            continue
        is_call = piece.value.path[0] == "tool_calls"  # a tool's answer may name it
        if piece.message in trained or (piece.value.message in trained and not is_call):
            raise RenderError(
                "the chat template writes words of a message where they are not known to be its own; "
                f"{WAYS_OUT}"
            )
