"""A chat template and the parts of a conversation that a model is trained on, as spans of characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.data.example import Message
from megatrain.data.tokens.rendering import Rendered, RenderError, Rendering, Span, check_no_marks, marked
from megatrain.errors import ConfigError, os_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = "plain"
_PLAIN = (
    "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}{{ '### ' + message['role'] | capitalize + ':\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}"
)
"""For models whose tokenizer has no template: it needs no token but those of begin and end."""

_ROLE_ALONE = re.compile(r"""\{\{-?\s*'<\|im_start\|>'\s*\+\s*message\.role\s*-?\}\}""")
"""Qwen 2.5's template begins a turn that calls tools with the role alone: the line break after it belongs to
what follows. So it does in TRL's training template, which trains on it, and masks agree."""

_REASONING_TAGS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_AFTER_REASONING = re.compile(r"\s*(?:</[^<>\s]+>|<\|[^<>\s|]+\|>)?\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOn:
    """Which part of a conversation is trained on."""

    roles: tuple[str, ...] = ("assistant",)
    last_only: bool = False
    """Of the assistant's turns the last alone."""
    everything: bool = False
    """The prompts and the template's own words too."""
    reasoning: bool = True
    """What the assistant thinks before it answers, with the tags around it."""

    @classmethod
    def of(cls, setting: str | Sequence[str], *, reasoning: bool) -> TrainOn:
        """Read `data.train_on` and `data.train_on_reasoning`."""
        if setting in ("all", "last", "assistant"):
            return cls(everything=setting == "all", last_only=setting == "last", reasoning=reasoning)
        return cls(roles=(setting,) if isinstance(setting, str) else tuple(setting), reasoning=reasoning)


class ChatTemplate:
    """Renders conversations, and tells which characters of them are trained on."""

    def __init__(
        self, sources: str | Mapping[str, str], special_tokens: Mapping[str, Any], day: date
    ) -> None:
        """Compile, and find out how the template begins the turns of each role.

        Args:
            sources: The template, or several by name, of which `default` and `tool_use` are used.
            special_tokens: As the tokenizer names them.
            day: That it is told if it asks for the time.

        Raises:
            ConfigError: It is not a template, or fails on two turns of plain text.
        """
        named = {"default": sources} if isinstance(sources, str) else dict(sources)
        default = named.get("default") or next(iter(named.values()))
        self._default = Rendering(default, special_tokens, day)
        tools = named.get("tool_use")
        self._with_tools = Rendering(tools, special_tokens, day) if tools else self._default
        self.source = "\n".join(dict.fromkeys((default, tools or default)))
        self._headers: dict[tuple[Rendering, str], str] = {}
        try:
            self.probe()
            self._header(self._default, "assistant")
        except RenderError as error:
            raise ConfigError(f"two plain turns: {error}; give another with data.chat_template") from error

    def probe(self) -> tuple[str, list[Span]]:
        """Return four plain turns as text, and the spans of the assistant's that are trained on."""
        turns = [{"role": role, "content": text} for role, text in _PROBE]
        rendered = self._default.render(turns)
        spans = [self._model_text(self._default, rendered, number, "assistant") for number in (1, 3)]
        return rendered.text, [span for parts in spans for span in parts]

    def spans(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], train_on: TrainOn
    ) -> tuple[str, list[Span]]:
        """Render a conversation.

        Args:
            messages: In order.
            tools: That the assistant may call.
            train_on: Which part of it.

        Returns:
            The text, and the spans of it that are trained on, in order.

        Raises:
            RenderError: The template refuses the messages, it cannot be told what it wrote for which of them,
                or a weight is neither 0 nor 1.
        """
        rendering = self._with_tools if tools else self._default
        rendered = _render(rendering, messages, tools, finds_reasoning=not train_on.reasoning)
        if train_on.everything:
            return rendered.text, _everything(rendered, messages, train_on)
        assistants = [number for number, message in enumerate(messages) if message.role == "assistant"]
        spans: list[Span] = []
        for number, message in enumerate(messages):
            is_wanted = message.role in train_on.roles
            if train_on.last_only:
                is_wanted = number in assistants[-1:]
            if message.loss_weight is not None and (is_wanted or not train_on.last_only):
                is_wanted = _is_trained(message.loss_weight)
            if is_wanted:
                parts = self._model_text(rendering, rendered, number, message.role)
                if not train_on.reasoning and message.role == "assistant":
                    parts = _less(parts, [cut for part in parts for cut in _reasoning(rendered, part)])
                spans += parts
        return rendered.text, spans

    def answer(
        self, prompt: Sequence[Message], answer: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, int]:
        """Render a prompt and an answer to it; return the text and where the answer begins.

        Raises:
            RenderError: As of `spans`.
        """
        messages = (*prompt, *answer)
        rendering = self._with_tools if tools else self._default
        rendered = _render(rendering, messages, tools)
        first = self._model_text(rendering, rendered, len(prompt), messages[len(prompt)].role)
        return rendered.text, first[0][0]

    def _model_text(self, rendering: Rendering, rendered: Rendered, number: int, role: str) -> list[Span]:
        """Return what was written for a message, without what the template begins every such turn with."""
        if rendering.has_generation and role == "assistant":
            return rendered.generated.get(number, [])
        segments = rendered.segments.get(number)
        if not segments:
            raise RenderError(f"the chat template writes nothing that is known to be message {number + 1}'s")
        header = self._header(rendering, role)
        start, end = _less_bos(rendering, rendered, number)
        if not rendered.text.startswith(header, start, end):
            raise RenderError(
                f"the chat template begins message {number + 1} in another way than {header!r}, so it is not "
                "known where the model's own text begins; mark it with {% generation %} in a template file"
            )
        return [span for span in ((start + len(header), end), *segments[1:]) if span[1] > span[0]]

    def _header(self, rendering: Rendering, role: str) -> str:
        """Return what every turn of a role begins with, whatever it says: in a prompt, it is given."""
        header = self._headers.get((rendering, role))
        if header is None:
            self._headers[rendering, role] = header = self._find_header(rendering, role)
        return header

    def _find_header(self, rendering: Rendering, role: str) -> str:
        begins: list[str] = []
        for text in ("Alpha", "Zulu"):
            for turns in _probes(role, text):
                try:
                    rendered = rendering.render(turns)
                except RenderError:
                    continue  # one that does not allow such an order of turns
                for number, message in enumerate(turns):
                    if message["role"] == role and number in rendered.segments:
                        start, end = _less_bos(rendering, rendered, number)
                        begins.append(rendered.text[start:end])
        header = _common(begins) if len(set(begins)) > 1 else ""
        if role == "assistant":
            asked = [{"role": "user", "content": "Alpha"}]
            prompt = rendering.text(asked, prompts=True).removeprefix(rendering.text(asked))
            header = _common([header, prompt]) if prompt else header
            if _ROLE_ALONE.search(self.source):
                header = header.removesuffix("\n")
        return header


_PROBE = (("user", "Alpha"), ("assistant", "Bravo"), ("user", "Golf"), ("assistant", "Tango"))


def _less_bos(rendering: Rendering, rendered: Rendered, number: int) -> Span:
    """Return the first that was written for a message; Llama 3 begins the text with it, whosever it is."""
    start, end = rendered.segments[number][0]
    is_first = number == 0 and rendered.text.startswith(rendering.bos, start, end)
    return (start + len(rendering.bos) if is_first else start), end


def _common(texts: Sequence[str]) -> str:
    """Return the longest beginning that texts share."""
    first, last = min(texts), max(texts)
    same = (a == b for a, b in zip(first, last, strict=False))
    return first[: next((place for place, is_same in enumerate(same) if not is_same), len(first))]


def _probes(role: str, text: str) -> list[list[dict[str, str]]]:
    turn, user, answer = ({"role": name, "content": text} for name in (role, "user", "assistant"))
    alone = [[turn]] if role != "assistant" else []
    return [*alone, [user, turn], [user, turn, dict(user), dict(answer)], [user, answer, turn]]


def template_source(setting: str | None, tokenizer: PreTrainedTokenizerBase) -> str | dict[str, str] | None:
    """Return the template of a file, the plain one, or the tokenizer's own; None: it has none.

    Raises:
        ConfigError: The file cannot be read.
    """
    if setting is None:
        own: Any = tokenizer.chat_template
        return own or None
    if setting == PLAIN:
        return _PLAIN
    if not Path(setting).exists():
        raise ConfigError(
            f"data.chat_template is {setting}, which is no file; it takes a file of Jinja, or plain, "
            "and the tokenizer's own template where it is not set"
        )
    with os_errors("read the chat template", setting, ConfigError):
        try:
            return Path(setting).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.chat_template {setting} is not UTF-8 text") from error


def as_mapping(message: Message) -> dict[str, Any]:
    """Return a message as a chat template reads it."""
    mapping: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        mapping |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        mapping["tool_calls"] = _plain(message.tool_calls)
    if message.name is not None:
        mapping["name"] = message.name
    return mapping


def _plain(value: Any) -> Any:
    """Return JSON's own types: a template's sandbox knows their methods, and no others."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _is_trained(weight: float) -> bool:
    if weight not in (0, 1):
        raise RenderError(f"loss_weight {weight:g} is neither 0 nor 1: a message is trained on, or it is not")
    return weight == 1


def _less(parts: Iterable[Span], cuts: Iterable[Span]) -> list[Span]:
    """Return what is left of spans."""
    left = list(parts)
    for start, end in cuts:
        pieces = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, end), b))]
        left = [(a, b) for a, b in pieces if a < b]
    return left


def _everything(rendered: Rendered, messages: Sequence[Message], train_on: TrainOn) -> list[Span]:
    """Return all of a text, less the messages whose weight is 0."""
    cuts: list[Span] = []
    for number, message in enumerate(messages):
        whole = rendered.segments.get(number, [])
        if message.loss_weight is not None and not _is_trained(message.loss_weight):
            cuts += whole
        elif not train_on.reasoning and message.role == "assistant":
            cuts += [cut for part in whole for cut in _reasoning(rendered, part)]
    return _less([(0, len(rendered.text))], cuts)


def _reasoning(rendered: Rendered, part: Span) -> list[Span]:
    """Find what an assistant thinks, with the tags around it, in what was written for its message."""
    text, (start, end) = rendered.text, part
    cuts = [found.span() for found in _REASONING_TAGS.finditer(text, start, end)]
    for first, last in rendered.marked:
        if start <= first <= last <= end and not any(a <= first < b for a, b in cuts):
            after = _AFTER_REASONING.match(text, last, end)
            assert after is not None
            cuts.append((start, after.end()))
    return cuts


def _render(
    rendering: Rendering,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    finds_reasoning: bool = False,
) -> Rendered:
    turns, given = [as_mapping(message) for message in messages], _plain(tools) or None
    check_no_marks([turns, given])
    if not finds_reasoning or all(message.reasoning is None for message in messages):
        return rendering.render(turns, tools=given)
    for turn, message in zip(turns, messages, strict=True):
        if message.reasoning and message.reasoning.strip():
            turn["reasoning_content"] = turn["thinking"] = marked(message.reasoning.strip())
    rendered = rendering.render(turns, tools=given)
    if rendered.text != rendering.text([as_mapping(message) for message in messages], tools=given):
        raise RenderError(
            "it is not known where the chat template writes the reasoning, which is not trained on"
        )
    return rendered
