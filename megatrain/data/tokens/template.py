"""A chat template, and the parts of a conversation that a model is trained on, as spans of characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.data.example import Message
from megatrain.data.templates import named_template, template_names
from megatrain.data.tokens.model_text import WAYS_OUT, ModelText, less, reasoning_in
from megatrain.data.tokens.rendering import Rendered, RenderError, Rendering, Span
from megatrain.errors import ConfigError, os_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = (("user", "Alpha"), ("assistant", "Bravo"), ("user", "Golf"), ("assistant", "Tango"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOn:
    """The parts of a conversation that are trained on."""

    roles: tuple[str, ...] = ("assistant",)
    last_only: bool = False
    """Whether only the last of the assistant's turns is trained on."""
    everything: bool = False
    """Whether the prompts and the template's own words are trained on too."""
    reasoning: bool = True
    """Whether the assistant's reasoning, with the tags around it, is trained on."""

    @classmethod
    def of(cls, setting: str | Sequence[str], *, reasoning: bool) -> TrainOn:
        """Read `data.train_on` and `data.train_on_reasoning`."""
        if setting in ("all", "last", "assistant"):
            return cls(everything=setting == "all", last_only=setting == "last", reasoning=reasoning)
        return cls(roles=(setting,) if isinstance(setting, str) else tuple(setting), reasoning=reasoning)

    def wanted(self, messages: Sequence[Message], num_prompt: int) -> list[int]:
        """Return the numbers of the messages that are trained on.

        Args:
            messages: The messages of a conversation.
            num_prompt: The number of first messages that are a prompt; all others are trained on.

        Raises:
            RenderError: A weight is neither 0 nor 1.
        """
        assistants = [number for number, message in enumerate(messages) if message.role == "assistant"]
        wanted = []
        for number, message in enumerate(messages):
            is_wanted = number in assistants[-1:] if self.last_only else message.role in self.roles
            weight = message.loss_weight
            if weight is None and num_prompt:
                weight = float(number >= num_prompt)
            if weight is not None and (is_wanted or not self.last_only):
                is_wanted = _is_trained(weight)
            if is_wanted:
                wanted.append(number)
        return wanted


class ChatTemplate:
    """Renders conversations, and tells which characters of them are trained on."""

    def __init__(
        self, sources: str | Mapping[str, str], special_tokens: Mapping[str, Any], day: date
    ) -> None:
        """Compile a template.

        Args:
            sources: The template, or several by name, of which `default` and `tool_use` are used.
            special_tokens: The special tokens, as the tokenizer names them.
            day: The date for a template that asks for the time.

        Raises:
            ConfigError: The source is no template.
        """
        named = {"default": sources} if isinstance(sources, str) else dict(sources)
        default = named.get("default") or next(iter(named.values()))
        self._default = ModelText(Rendering(default, special_tokens, day))
        tools = named.get("tool_use")
        self._with_tools = ModelText(Rendering(tools, special_tokens, day)) if tools else self._default

    def check(self) -> None:
        """Check that the model's own text can be found in plain turns.

        Raises:
            ConfigError: The text cannot be found, or the template refuses the turns.
        """
        try:
            self.probe()
        except RenderError as error:
            raise ConfigError(f"plain turns of user and assistant: {error}; {WAYS_OUT}") from error

    def probe(self) -> tuple[str, list[Span]]:
        """Return four plain turns as text, and the spans of the assistant's that are trained on.

        Raises:
            RenderError: `spans` raises it.
        """
        return self.spans([Message(role=role, content=text) for role, text in _PROBE], (), TrainOn())

    def spans(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        train_on: TrainOn,
        *,
        num_prompt: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Render a conversation.

        Args:
            messages: The messages in order.
            tools: The tools that the assistant may call.
            train_on: The parts that are trained on.
            num_prompt: The number of first messages that are a prompt, as in `TrainOn.wanted`.
            options: Other variables of the template.

        Returns:
            The text, and the spans of it that are trained on, in order.

        Raises:
            RenderError: The template refuses the messages, the origin of its text is unknown, or a weight is
                neither 0 nor 1.
        """
        model_text = self._with_tools if tools else self._default
        conversation = model_text.forms.conversation(messages, tools, options)
        if train_on.everything and train_on.reasoning and all(one.loss_weight is None for one in messages):
            text = model_text.rendering.text(conversation)
            return text, [(0, len(text))]
        rendered = model_text.rendering.render(conversation)
        if not train_on.reasoning:
            model_text.check_reasoning(conversation, rendered)
        if train_on.everything:
            return rendered.text, _everything(rendered, messages, train_on)
        wanted = train_on.wanted(messages, num_prompt)
        spans: list[Span] = []
        for number, parts in model_text.spans(conversation, rendered, messages, wanted).items():
            if not train_on.reasoning and messages[number].role == "assistant":
                parts = less(parts, [cut for part in parts for cut in reasoning_in(rendered, number, part)])
            spans += parts
        return rendered.text, sorted(spans)

    def answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        num_prompt: int,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[str, int]:
        """Render a prompt and an answer to it; return the text and where the answer begins.

        Args:
            messages: The messages of both.
            tools: The tools that the assistant may call.
            num_prompt: The number of first messages that are the prompt. Messages behind them, but before the
                assistant's first turn there, belong to the prompt too.
            options: Other variables of the template.

        Raises:
            RenderError: `spans` raises it.
        """
        model_text = self._with_tools if tools else self._default
        conversation = model_text.forms.conversation(messages, tools, options)
        rendered = model_text.rendering.render(conversation)
        answers = (at for at in range(num_prompt, len(messages)) if messages[at].role == "assistant")
        first = next(answers, num_prompt)
        spans = model_text.spans(conversation, rendered, messages, [first])[first]
        if not spans:
            raise RenderError("the chat template writes nothing that the model says")
        return rendered.text, spans[0][0]


def _is_trained(weight: float) -> bool:
    if weight not in (0, 1):
        raise RenderError(f"loss_weight {weight:g} is neither 0 nor 1: a message is trained on, or it is not")
    return weight == 1


def _everything(rendered: Rendered, messages: Sequence[Message], train_on: TrainOn) -> list[Span]:
    """Return the spans of all of a text, without the messages whose weight is 0."""
    cuts: list[Span] = []
    for number, message in enumerate(messages):
        whole = rendered.spans(number)
        if message.loss_weight is not None and not _is_trained(message.loss_weight):
            cuts += whole
        elif not train_on.reasoning and message.role == "assistant":
            cuts += [cut for part in whole for cut in reasoning_in(rendered, number, part)]
    return less([(0, len(rendered.text))], cuts)


def template_source(setting: str | None, tokenizer: PreTrainedTokenizerBase) -> str | dict[str, str] | None:
    """Return the template of a name or a file, or the tokenizer's own; None if it has none.

    Raises:
        ConfigError: The file cannot be read.
    """
    if setting is None:
        own: Any = tokenizer.chat_template
        return own or None
    named = named_template(setting)
    if named is not None:
        return named
    if not Path(setting).exists():
        raise ConfigError(
            f"data.chat_template is {setting}, which is no file and no template that has a name here; give a "
            f"file of Jinja, or one of {', '.join(template_names())}; where it is not set, the tokenizer's "
            "own is used"
        )
    with os_errors("read the chat template", setting, ConfigError):
        try:
            return Path(setting).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.chat_template {setting} is not UTF-8 text") from error
