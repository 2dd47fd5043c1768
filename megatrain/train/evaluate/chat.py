"""A conversation with a model in the words of its chat template."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from megatrain.data.templates import template_names
from megatrain.data.tokens.template import template_source
from megatrain.errors import ConfigError, is_text
from megatrain.model.sequence.range import row_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_QUESTION, _ANSWER = "Alpha", "Bravo"


class Chat:
    """Asks a model, and remembers the conversation.

    The model is given the tokens of the tokenizer's `apply_chat_template`, with the prompt for an answer at
    the end. It stops at each token that ends a turn: those of its generation configuration, the tokenizer's
    end of text, and the one that the template writes behind an answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str | None = None,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
    ) -> None:
        """Begin a conversation.

        Args:
            model: The model, in the mode that is wanted.
            tokenizer: The tokenizer of the model.
            template: The name or file of a chat template; None uses the tokenizer's own.
            system: The system prompt; None leaves it to the template.
            max_new_tokens: The largest number of tokens of an answer.
            temperature: The temperature; 0 takes the likeliest token each time.

        Raises:
            ConfigError: There is no chat template, or it refuses plain turns.
        """
        source = template_source(template, tokenizer)
        if source is None:
            raise ConfigError(
                "the tokenizer has no chat template, so it is not known how this model is talked to: "
                "megatrain sample continues a text, and megatrain chat --chat-template takes a file, or a "
                f"name: {', '.join(template_names())}"
            )
        tokenizer.chat_template = source
        self._model, self._tokenizer = model, tokenizer
        self._options: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature:
            self._options["temperature"] = temperature
        self._max_new_tokens = max_new_tokens
        self._context = row_range(model.config).longest
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._system)
        """The conversation so far."""
        self.stop_ids = stop_ids(model, tokenizer)

    def forget(self) -> None:
        """Start a new conversation."""
        self.messages = list(self._system)

    def ask(self, question: str, show: Callable[[str], object] | None = None) -> str:
        """Return the model's answer, which is remembered with the question.

        Args:
            question: The user's question.
            show: The function that is given the answer in pieces, as soon as there are words.

        Raises:
            ConfigError: The question is no text, the conversation is longer than the model's context, or the
                template refuses it.
        """
        import torch

        if not is_text(question):
            raise ConfigError("what was asked is not UTF-8 text; ask again")
        asked = [*self.messages, {"role": "user", "content": question}]
        ids = self._prompt(asked)
        room = self._max_new_tokens if self._context is None else self._context - len(ids)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(ids):,} tokens, and the model takes {self._context:,}, so there"
                " is no room for an answer; begin anew (/clear)"
            )
        given = torch.tensor([ids])
        with torch.no_grad():
            made: Any = self._model.generate(
                given,
                attention_mask=torch.ones_like(given),
                eos_token_id=self.stop_ids,
                pad_token_id=self.stop_ids[0] if self.stop_ids else 0,
                max_new_tokens=min(self._max_new_tokens, room),
                max_length=None,
                streamer=None if show is None else self._streamer(show),
                **self._options,
            )
        said = [each for each in made[0, len(ids) :].tolist() if each not in self.stop_ids]
        answer = str(self._tokenizer.decode(said, skip_special_tokens=True)).strip()
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer

    def _streamer(self, show: Callable[[str], object]) -> Any:
        """Return the streamer that passes new words on while the model writes."""
        from transformers import TextStreamer

        stop_ids = self.stop_ids

        class Shown(TextStreamer):
            def put(self, value: Any) -> None:
                if value.numel() > 1 or int(value) not in stop_ids:
                    super().put(value)

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                if text:
                    show(text)

        return Shown(self._tokenizer, skip_prompt=True, skip_special_tokens=True)

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            ids: Any = self._tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},  # `ask` reports a conversation that is too long
            )
        except TemplateError as error:
            raise ConfigError(f"the chat template refuses the conversation: {error}") from error
        return list(ids)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens at which an answer ends, in order; the tokenizer must have a chat template.

    Raises:
        ConfigError: The template refuses plain turns.
    """
    from megatrain.model.weights.generation import ids_of_end

    named = [] if model.generation_config is None else ids_of_end(model.generation_config)
    found = {*named, tokenizer.eos_token_id, _end_of_turn(tokenizer)}
    return sorted(int(each) for each in found if each is not None)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that the template writes behind the last answer; None if it writes text or nothing."""
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except TemplateError as error:
        raise ConfigError(f"the chat template refuses plain turns: {error}") from error
    _, _, behind = text.rpartition(_ANSWER)
    ends = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
    for each in tokenizer(behind, add_special_tokens=False)["input_ids"]:
        if each in ends:
            return int(each)
        if tokenizer.decode([each]).strip():
            return None
    return None


def converse(
    chat: Chat,
    read: Callable[[], str | None],
    show: Callable[[str], object],
    say: Callable[[str], object],
) -> None:
    """Ask each question that is read, until there is none left.

    An answer that Ctrl-C ends is forgotten with its question.

    Args:
        chat: The conversation with the model.
        read: The function that returns the user's next question, or None after the last.
        show: The function that is given answers in pieces.
        say: The function that is given everything else.
    """
    while (line := read()) is not None:
        words = line.strip()
        if words in ("/exit", "/quit"):
            return
        if words == "/clear":
            chat.forget()
            say("the conversation begins anew")
        elif words:
            with suppress(KeyboardInterrupt):
                try:
                    chat.ask(words, show)
                except ConfigError as error:
                    say(str(error))
            show("\n")
