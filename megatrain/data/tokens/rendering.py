"""Chat templates that say which characters of the text they wrote for which message.

A template is compiled a second time, with marks put into its syntax tree: at the start of every loop's body,
after every loop, and around `{% generation %}` blocks. A mark writes two noncharacters of Unicode and a
number into the text, from which it is then taken out again, so one rendering gives the text and the exact
span of each message in it, whatever the template makes of the messages before and after. The sandbox, the
filters and the functions of templates are those of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

from megatrain.errors import ConfigError

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters: no text has them. One that does is refused (`check_no_marks`): it could pass for ours."""
_MARK = re.compile(f"{_OPEN}([a-z])([0-9]+):([0-9]+){_CLOSE}")
_CALL = "megatrain_mark"

Span = tuple[int, int]


class RenderError(Exception):
    """A template cannot render these messages, or what it wrote cannot be attributed."""


@dataclass(slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    segments: dict[int, list[Span]] = field(default_factory=dict)
    """By message, the characters that were written for it."""
    generated: dict[int, list[Span]] = field(default_factory=dict)
    """By message, the characters inside of `{% generation %}`."""
    marked: list[Span] = field(default_factory=list)
    """What `marked` was put around and the template has written."""


def check_no_marks(value: object) -> None:
    """Check that nothing in plain values could be taken for a mark.

    Raises:
        RenderError: Something could.
    """
    if isinstance(value, str):
        if _OPEN in value or _CLOSE in value:
            raise RenderError("a text holds U+FDD0 or U+FDD1, which stand for no character")
    elif isinstance(value, Mapping):
        check_no_marks([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_no_marks(item)


def marked(text: str) -> str:
    """Put marks around a text of a message, so that it is found again where the template writes it."""
    return f"{_OPEN}r0:0{_CLOSE}{text}{_OPEN}s0:0{_CLOSE}"


class Rendering:
    """A chat template, compiled with marks."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any], day: date) -> None:
        """Compile.

        Args:
            source: The template.
            special_tokens: `bos_token` and others that it may name.
            day: Its midnight is the time that `strftime_now` writes.

        Raises:
            ConfigError: It is not a template.
        """
        try:
            environment = _compile_jinja_template(source).environment
            tree = environment.parse(source)
            marked = _Marking().visit(tree)
            marked.set_environment(environment)
            self._template = environment.from_string(marked)
            self._plain = _compile_jinja_template(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not one: {error}; check data.chat_template") from error
        self.has_generation = any(
            _is_generation(block) for block in environment.parse(source).find_all(nodes.CallBlock)
        )
        self._names = {**special_tokens, "strftime_now": datetime.combine(day, time()).strftime}
        self.bos = str(self._names.get("bos_token") or "")

    def text(self, messages: Sequence[Mapping[str, Any]], *, prompts: bool = False, tools: Any = None) -> str:
        """Render without marks, as transformers does.

        Args:
            messages: Plain mappings.
            prompts: Let the template begin the assistant's next turn.
            tools: Plain mappings; None: none.

        Raises:
            RenderError: The template refuses the messages.
        """
        return self._render(self._plain, messages, tools, prompts)

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None) -> Rendered:
        """Render, and say which characters are whose.

        Raises:
            RenderError: The template refuses the messages, or takes marks away.
        """
        numbers = {id(message): number for number, message in enumerate(messages)}
        count = 0

        def mark(kind: str, loop: int, value: object = None) -> str:
            nonlocal count
            number = numbers.get(id(value)) if kind == "b" else 0
            if number is None:
                return ""
            count += 1
            return f"{_OPEN}{kind}{loop}:{number}{_CLOSE}"

        raw = self._render(self._template, messages, tools, False, mark)
        kinds = [found[1] for found in _MARK.finditer(raw)]
        own = sum(kind in "begh" for kind in kinds)
        if own != count or raw.count(_OPEN) != len(kinds) or raw.count(_CLOSE) != len(kinds):
            raise RenderError("the chat template changes what it has written")
        return _read_marks(raw)

    def _render(self, template: Any, messages: Any, tools: Any, prompts: bool, mark: Any = None) -> str:
        given = {**self._names, _CALL: mark}
        try:
            return str(
                template.render(
                    messages=messages, tools=tools, documents=None, add_generation_prompt=prompts, **given
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RenderError(f"the chat template refuses it ({reason})") from error


def _read_marks(raw: str) -> Rendered:
    """Take the marks out of a text, and note where they were."""
    parts: list[str] = []
    rendered = Rendered("")
    open_loops: list[tuple[int, int]] = []
    place = last = start = generation_start = thought_start = 0

    def close_segment() -> None:
        if open_loops and place > start:
            rendered.segments.setdefault(open_loops[-1][1], []).append((start, place))

    for found in _MARK.finditer(raw):
        piece = raw[last : found.start()]
        parts.append(piece)
        place, last = place + len(piece), found.end()
        kind, loop, number = found[1], int(found[2]), int(found[3])
        if kind == "g":
            generation_start = place
            continue
        if kind == "r":
            thought_start = place
            continue
        if kind == "s":
            rendered.marked.append((thought_start, place))
            continue
        if kind == "h":
            if open_loops:
                rendered.generated.setdefault(open_loops[-1][1], []).append((generation_start, place))
            continue
        close_segment()
        start = place
        if loop in [inner for inner, _ in open_loops]:
            while open_loops[-1][0] != loop:
                open_loops.pop()
            open_loops.pop()
        if kind == "b":
            open_loops.append((loop, number))
    parts.append(raw[last:])
    rendered.text = "".join(parts)
    return rendered


class _Marking(NodeTransformer):
    """Puts marks into a template's syntax tree."""

    def __init__(self) -> None:
        self._num_loops = 0

    def visit_For(self, node: nodes.For) -> Any:
        self._num_loops += 1
        number = self._num_loops
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name):
            return node
        node.body.insert(0, _mark("b", number, node.lineno, nodes.Name(node.target.name, "load")))
        return [node, _mark("e", number, node.lineno)]

    def visit_CallBlock(self, node: nodes.CallBlock) -> Any:
        self.generic_visit(node)
        if not _is_generation(node):
            return node
        line = node.lineno
        return [_mark("g", 0, line), nodes.Scope(node.body, lineno=line), _mark("h", 0, line)]


def _is_generation(block: nodes.CallBlock) -> bool:
    return isinstance(block.call.node, nodes.ExtensionAttribute) and "generation" in block.call.node.name


def _mark(kind: str, loop: int, line: int, *values: nodes.Expr) -> nodes.Output:
    given = [nodes.Const(kind), nodes.Const(loop), *values]
    call = nodes.Call(nodes.Name(_CALL, "load"), given, [], None, None)
    return nodes.Output([call], lineno=line)
