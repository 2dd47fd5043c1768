"""The encoder renders examples, tokenises each as a whole once, and finds the trained tokens by offsets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data.example import (
    ChatExample,
    CompletionExample,
    Example,
    JudgedExample,
    Message,
    TextExample,
    TokensExample,
    Turns,
)
from megatrain.data.flagged_tokens import IDS, TRAINED, Words, join_words
from megatrain.data.pairs import Judged
from megatrain.data.templates import template_names
from megatrain.data.tokens.left_out import why_left_out
from megatrain.data.tokens.rendering import RenderError, Span
from megatrain.data.tokens.template import ChatTemplate, TrainOn
from megatrain.errors import ConfigError, DataError
from megatrain.objective.objective import Objective
from megatrain.objective.registry import DEFAULT, names_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_TEMPLATE = (
    "the data holds conversations, but the tokenizer has no chat template; set data.chat_template to a "
    f"template file, or to a name: {', '.join(template_names())}; plain needs no special tokens"
)


@dataclass(frozen=True, slots=True)
class Refused:
    """An example that cannot be trained on."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class EncoderRecipe:
    """The ingredients of an `Encoder`, which is the same in every process."""

    tokenizer: PreTrainedTokenizerBase
    template: str | Mapping[str, str] | None
    """The chat template, or several by name; None if there is none."""
    train_on: TrainOn
    end_id: int
    """The id of the token that ends a document."""
    day: date = field(default_factory=lambda: date.today())
    """The date for templates that ask for the time; it stays fixed while data are prepared."""
    objective: Objective = DEFAULT
    """The objective, which decides what kind of example is accepted."""

    @property
    def asks_day(self) -> bool:
        """Whether the template may ask for the time."""
        return "strftime_now" in str(self.template)

    def make(self) -> Encoder:
        """Compile the template and return the encoder.

        Raises:
            ConfigError: The template cannot be used.
        """
        names = dict(self.tokenizer.special_tokens_map)
        return Encoder(self, None if self.template is None else ChatTemplate(self.template, names, self.day))


@dataclass(frozen=True, slots=True)
class _Text:
    """The text to be tokenised, and its spans that are trained on."""

    text: str
    spans: Sequence[Span]
    is_rendered: bool
    """Whether it has its special tokens; if not, the tokenizer adds its own, and an end token follows."""


class Encoder:
    """Turns examples into words; the same in every process."""

    def __init__(self, recipe: EncoderRecipe, template: ChatTemplate | None) -> None:
        """Store what examples are encoded with.

        Args:
            recipe: The ingredients. The tokenizer must be a fast one, with offsets.
            template: The chat template that was made of the recipe's; None if there is none.
        """
        self._tokenizer, self._template, self._objective = recipe.tokenizer, template, recipe.objective
        self._train_on, self._end_id = recipe.train_on, recipe.end_id
        self._is_checked = False
        """Whether the template has been checked. The first chat triggers that, since texts need none."""

    def encode(self, examples: Sequence[Example]) -> list[Words | Refused]:
        """Return each example's words, the first with the flag START, or the reason why there are none.

        Raises:
            ConfigError: There is a chat and no template, or the tokenizer has no offsets.
            DataError: The objective does not accept these examples.
        """
        for example in examples:
            self._check_kind(example)
        results: list[Words | Refused | None] = [None] * len(examples)
        texts: dict[int, _Text] = {}
        for number, example in enumerate(examples):
            if isinstance(example, TokensExample):
                results[number] = _of_tokens(example)
                continue
            try:
                texts[number] = self._text(example)
            except RenderError as error:
                results[number] = Refused(str(error))
        for is_rendered in (True, False):
            some = {number: text for number, text in texts.items() if text.is_rendered is is_rendered}
            for number, words in zip(some, self._tokenise(list(some.values()), is_rendered), strict=True):
                results[number] = words
        return [result for result in results if result is not None]

    @property
    def takes_judged(self) -> bool:
        """Return whether examples go to `encode_judged` instead of `encode`."""
        return self._objective.rows.is_judged

    def untrained_end(self) -> str | None:
        """Return the end token of an assistant's turn if it is untrained; None otherwise or without a chat.

        A model that is never trained to end its turn does not stop.
        """
        if self._template is None or self._train_on.everything or "assistant" not in self._train_on.roles:
            return None
        text, turns = self._template.probe()
        encoding: Any = self._tokenizer([text], add_special_tokens=False).encodings[0]
        ends = {*self._tokenizer.get_added_vocab().values(), *self._tokenizer.all_special_ids}
        trained = _trained(encoding.offsets, turns, len(encoding.ids))
        last = [place for place in np.flatnonzero(trained) if not np.all(trained[place : place + 2])]
        for place in last:
            while place and trained[place] and not self._tokenizer.decode([encoding.ids[place]]).strip():
                place -= 1  # the line break that follows an end token
            if encoding.ids[place] in ends:
                continue
            rest = [number for number in encoding.ids[place + 1 :] if number in ends]
            token = self._tokenizer.decode(rest[:1]) if rest else None
            what, way = "has no token that ends it", "end it with"
            if token:
                what, way = f"ends with {token}, which is not trained on", "let {% generation %} enclose it"
            elif self._tokenizer.eos_token:
                way += f" the tokenizer's {self._tokenizer.eos_token}"
            else:
                way += " a token of the tokenizer's"
            return (
                f"in this chat template a turn of the assistant's {what}: the model does not learn to stop; "
                f"{way} in a template file (data.chat_template)"
            )
        return None

    def left_out(self, held: Collection[str]) -> str | None:
        """Return a warning about what the chat template silently drops from the data; None if nothing.

        Args:
            held: The kinds of content that any example holds, as `held_by` returns them.
        """
        return None if self._template is None else why_left_out(self._template, held)

    def encode_pair(self, example: JudgedExample) -> Judged:
        """Return answers with their prompts, ended by the template or by the token that ends a document.

        Raises:
            ConfigError: There is a chat and no template.
            RenderError: The template refuses the example.
        """
        answers = example.answers
        plain = [answer for answer in answers if isinstance(answer, str)]
        if isinstance(example.prompt, str) and len(plain) == len(answers):
            sides = self._plain_sides(example.prompt, plain)
        else:
            sides = [self._chat_side(example, answer) for answer in answers]
        prompts, answered = zip(*sides, strict=True)
        return Judged(prompts, answered, example.is_good)

    def _plain_sides(self, prompt: str, answers: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Split answers from their prompt where the tokens differ from those of the prompt alone, as TRL."""
        texts = [
            _Text(text, [(0, len(text))], False) for text in (prompt, *(prompt + one for one in answers))
        ]
        alone, *whole = [(words & IDS).tolist() for words in self._tokenise(texts, False)]
        shared = min(_num_shared(alone, ids) for ids in whole)
        return [(ids[:shared], ids[shared:]) for ids in whole]

    def _chat_side(self, example: JudgedExample, answer: Turns) -> tuple[list[int], list[int]]:
        """Split an answer from its prompt where the template begins the answer."""
        prompt = example.prompt
        asked = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
        told = (Message(role="assistant", content=answer),) if isinstance(answer, str) else answer
        text, start = self._require_template().answer(
            (*asked, *told), example.tools, num_prompt=len(asked), options=example.options
        )
        (words,) = self._tokenise([_Text(text, [(start, len(text))], True)], True)
        first = int(np.argmax(words & TRAINED != 0)) if (words & TRAINED).any() else len(words)
        return (words[:first] & IDS).tolist(), (words[first:] & IDS).tolist()

    def encode_judged(self, examples: Sequence[Example]) -> list[Judged | Refused]:
        """Return each example's prompt and answers, or the reason why there are none.

        Raises:
            ConfigError: There is a chat and no template, or the tokenizer has no offsets.
            DataError: The objective does not accept these examples.
        """
        results: list[Judged | Refused] = []
        for example in examples:
            self._check_kind(example)
            assert isinstance(example, JudgedExample)
            try:
                results.append(self.encode_pair(example))
            except RenderError as error:
                results.append(Refused(str(error)))
        return results

    def _check_kind(self, example: Example) -> None:
        """Refuse an example that the objective does not accept.

        Raises:
            DataError: The objective does not accept the example.
        """
        rows, objective = example.rows, self._objective
        if rows == objective.rows:
            return
        why = "" if self.takes_judged else ", which would train on all of them as if they were good"
        raise DataError(
            f"{example.source}: the data holds {rows.held}, but train.loss is {objective.name}{why}; use "
            f"train.loss={names_for(rows)}"
        )

    # -- text ------------------------------------------------------------------------------------------------

    def _text(self, example: Example) -> _Text:
        if isinstance(example, TextExample):
            return _Text(example.text, [(0, len(example.text))], False)
        if isinstance(example, CompletionExample):
            text = example.prompt + example.completion
            start = 0 if self._train_on.everything else len(example.prompt)
            return _Text(text, [(start, len(text))], False)
        if isinstance(example, ChatExample):
            text, spans = self._require_template().spans(
                example.messages,
                example.tools,
                self._train_on,
                num_prompt=example.num_prompt,
                options=example.options,
            )
            return _Text(text, spans, True)
        raise AssertionError(f"{type(example).__name__} has no one text")

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            raise ConfigError(_NO_TEMPLATE)
        if not self._is_checked and not (self._train_on.everything and not self.takes_judged):
            self._template.check()
        self._is_checked = True
        return self._template

    # -- tokens ----------------------------------------------------------------------------------------------

    def _tokenise(self, texts: Sequence[_Text], is_rendered: bool) -> Iterator[Words]:
        if not texts:
            return
        if not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError(
                "this tokenizer does not say which characters its tokens stand for; use a directory with a "
                "tokenizer.json (data.tokenizer)"
            )
        # verbose=False: texts longer than the model's context are expected here, and cut or dropped later
        encoded: Any = self._tokenizer(
            [text.text for text in texts],
            add_special_tokens=not is_rendered,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for text, encoding in zip(texts, encoded.encodings, strict=True):
            ids, offsets = np.array(encoding.ids, dtype=np.int32), encoding.offsets
            if not is_rendered and _adds_first_again(encoding):
                ids, offsets = ids[1:], offsets[1:]
            if text.spans == [(0, len(text.text))]:
                trained = np.ones(len(ids), dtype=np.bool_)
            else:
                trained = _trained(offsets, text.spans, len(ids))
            if not is_rendered and (len(ids) == 0 or ids[-1] != self._end_id):
                ids, trained = np.append(ids, np.int32(self._end_id)), np.append(trained, True)
            yield join_words(ids, trained)


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _adds_first_again(encoding: Any) -> bool:
    """Return whether the tokenizer has put its first token before a text that begins with it already."""
    ids, offsets = encoding.ids[:2], encoding.offsets[:2]
    return len(ids) == 2 and ids[0] == ids[1] and offsets[0] == (0, 0) and offsets[1][1] > 0


def _trained(offsets: Sequence[Span], spans: Sequence[Span], count: int) -> NDArray[np.bool_]:
    """Mark the tokens that hold a character of the spans, and those between two such tokens.

    Tokens that stand for no character, such as those that a tokenizer adds itself, are not trained on before
    the text; behind it they are trained on if the end of the text is.
    """
    trained = np.zeros(count, dtype=np.bool_)
    if not spans or not count:
        return trained
    places = np.array(offsets, dtype=np.int64)
    ends = np.maximum.accumulate(places[:, 1])
    starts = np.maximum.accumulate(places[:, 0])
    for start, end in spans:
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(starts, end, side="left"))
        trained[first:last] = True
    return trained


def show(words: Words, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Decode words in pieces; return each with whether it is trained on."""
    trained = words & TRAINED != 0
    changes = np.flatnonzero(np.diff(trained)) + 1
    pieces = np.split(words & IDS, changes)
    flags = [bool(trained[place]) for place in (0, *changes)] if len(words) else []
    return [(tokenizer.decode(piece.tolist()), flag) for piece, flag in zip(pieces, flags, strict=False)]


def _of_tokens(example: TokensExample) -> Words | Refused:
    ids = np.array(example.input_ids, dtype=np.int64)
    if len(ids) == 0 or ids.min() < 0 or ids.max() > IDS:
        return Refused(f"input_ids must be whole numbers from 0 to {IDS:,}")
    if example.labels is None:
        return join_words(ids, np.ones(len(ids), dtype=np.bool_))
    labels = np.array(example.labels, dtype=np.int64)
    if labels.shape != ids.shape:
        return Refused(f"there are {len(ids)} input_ids and {len(labels)} labels; each token has one label")
    trained = labels != -100
    if (labels[trained] != ids[trained]).any():
        return Refused("a label differs from its token; labels are the input_ids, or -100 where not trained")
    return join_words(ids, trained)
