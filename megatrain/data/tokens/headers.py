"""The boundary in an assistant's turn between the header that a prompt gives and the model's own text.

When the model is asked, the template ends the prompt with the beginning of the assistant's turn. The common
part of this prompt and the turn is given, and is not trained on. It is found by rendering that prompt, once
for each opening, which is the text of a turn before the first word of its message.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property

from megatrain.data.tokens.rendering import Conversation, Rendered, RenderError, Rendering, Span

_ROLE_ALONE = re.compile(r"""\{\{-?\s*'<\|im_start\|>'\s*\+\s*message\.role\s*-?\}\}""")
"""Qwen 2.5's template begins a turn that calls tools with the role alone: the line break after it belongs to
what follows. TRL's training template does the same and trains on it, so masks agree."""

_WORDS = re.compile(r"<[^<>]*>|\w+|.", re.DOTALL)
"""The units of what is given, so that half a tag in common counts as nothing in common."""

_MOST_KNOWN = 10_000
"""The number of cached openings, a bound for templates whose turns all begin differently."""
_NOT_SAID = ("role", "name", "tool_call_id")
"""The keys of a message that are not its words."""


class Headers:
    """Finds the given beginnings of the assistant's turns."""

    def __init__(self, rendering: Rendering, plain: Conversation) -> None:
        """Store a template, and a question with its answer in the form that it takes."""
        self._rendering = rendering
        self._plain = plain
        self._known: dict[tuple[str, str, str], int] = {}
        """The number of given characters, by opening, the role before it and options."""

    def begin(self, conversation: Conversation, rendered: Rendered, number: int) -> int:
        """Return the position behind the given part of an assistant's message.

        Raises:
            RenderError: The position is unknown.
        """
        start, end = self._opening(rendered, number)
        opening = rendered.text[start:end]
        before = str(conversation.messages[number - 1]["role"]) if number else ""
        key = (opening, before, repr(conversation.options))
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            length = len(opening) and self._length(conversation, number, opening)
            if _ROLE_ALONE.search(self._rendering.source) and opening[:length].endswith("\n"):
                length -= 1
            self._known[key] = length
        return start + self._known[key]

    def _opening(self, rendered: Rendered, number: int) -> Span:
        """Return the text that was written for a message before the first of its words."""
        start, end = rendered.spans(number)[0]
        words = (
            piece.start
            for piece in rendered.written[number]
            if piece.value is not None and piece.value.path[0] not in _NOT_SAID
        )
        return start, min(end, next(words, end))

    def _length(self, conversation: Conversation, number: int, opening: str) -> int:
        """Return the number of given characters of an opening."""
        if number == 0:  # templates may begin the text with the first message, whatever its role
            return self._length_after_a_question(conversation, number, opening)
        usual = self._usually_given
        given = self._prompt(conversation, number) if self._has_prompts else usual
        # A template file may have other white space in places, and may begin the text with this turn.
        begun = opening.lstrip().removeprefix(self._rendering.bos).lstrip()
        skipped = len(opening) - len(begun)
        for beginning in filter(str.strip, (given or "", usual)):
            words = beginning.strip()
            if begun.startswith(words):
                space = beginning[len(beginning.rstrip()) :]
                return skipped + len(words) + len(_common(space, begun[len(words) :]))
        prompt = usual if given is None else given
        common = _common(prompt.lstrip(), begun)
        if prompt.strip() and not common and number > 1:  # the turn continues where the prompt ended it
            return self._length_after_a_question(conversation, number, opening)
        if prompt.strip() and not common:
            raise RenderError(
                f"the chat template begins a turn of the assistant's with {opening!r} and a prompt for it "
                f"with {prompt!r}, so it is not known where the model's own text begins"
            )
        return skipped + len(common) if common else 0

    def _length_after_a_question(self, conversation: Conversation, number: int, opening: str) -> int:
        """Return the number of given characters of an opening, by the model's prompt after a question."""
        messages = [self._plain.messages[0], *conversation.messages[number:]]
        asked = replace(conversation, messages=messages)
        rendered = self._rendering.render(asked)
        start, end = self._opening(rendered, 1)
        model_text = rendered.text[self.begin(asked, rendered, 1) : end]
        if not opening.endswith(model_text):
            raise RenderError(
                f"the chat template begins a turn of the assistant's with {opening!r}, and with "
                f"{rendered.text[start:end]!r} after a question, so it is not known where the model's own "
                "text begins"
            )
        return len(opening) - len(model_text)

    @cached_property
    def _has_prompts(self) -> bool:
        """Return whether the template begins the assistant's turn when asked to."""
        asked = self._plain.before(1)
        return self._rendering.text(asked, prompts=True) != self._rendering.text(asked)

    @cached_property
    def _usually_given(self) -> str:
        """Return the given part of a plain answer."""
        rendered = self._rendering.render(self._plain)
        start, end = self._opening(rendered, 1)
        opening = rendered.text[start:end]
        if not self._has_prompts:
            if not rendered.repeated(1, "content"):
                raise RenderError("the chat template does not tell where an answer begins")
            return opening.rstrip(" ")  # only the words are the model's
        given = self._prompt(self._plain, 1)
        if given is None:  # a last question reads differently, so the end of the prompt is compared
            prompt = self._rendering.text(self._plain.before(1), prompts=True)
            ends = (opening[:place] for place in range(len(opening), -1, -1))
            given = next(end for end in ends if prompt.endswith(end))
        return given

    def _prompt(self, conversation: Conversation, number: int) -> str | None:
        """Return the rest of the prompt from where a message begins; None if it differs before."""
        try:
            prompt = self._rendering.text(conversation.before(number), prompts=True)
            rendered = self._rendering.render(conversation.before(number + 1))
        except RenderError:
            return None  # there is nothing before an assistant's message
        if not rendered.spans(number):
            return None
        start, _ = self._opening(rendered, number)
        return prompt[start:] if prompt.startswith(rendered.text[:start]) else None


def _common(one: str, other: str) -> str:
    """Return the words that two texts begin with."""
    length = 0
    for first, second in zip(_WORDS.findall(one), _WORDS.findall(other), strict=False):
        if first != second:
            break
        length += len(first)
    return one[:length]
