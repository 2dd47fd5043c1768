"""The YAML of settings, in which a value means what it looks like.

PyYAML follows YAML 1.1, where `no` is false, `1e-3` is text, 010 is 8 and 1:30 is 90. Here scalars are those
of YAML 1.2's core schema, a key given twice is an error, and what `dump_yaml` writes reads the same in both.
"""

from __future__ import annotations

import os
import re
from typing import Any

import yaml

from megatrain.errors import ConfigError

_MOST_DEPTH = 64
"""The depth of nested lists and mappings beyond which no sensible file goes."""
_MOST_VALUES = 50_000
"""The number of values, each alias counted with all that it stands for: a few lines may stand for billions.
PyYAML takes a second for this many."""
_MOST_BYTES = 2**20
"""The size of a file of settings beyond which it is something else."""
_MOST_DIGITS = 100
"""The digits of a whole number; Python does not print those of more than 4,300."""
_SHOWN = 60


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of YAML 1.2 and without duplicate keys; as safe as `yaml.safe_load`."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (yaml's own name)
    _depth = 0
    _num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            problem = f"lists and mappings are inside each other, more than {_MOST_DEPTH} deep"
            raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            problem = f"there are more than {_MOST_VALUES:,} values; write fewer"
            raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _measure(node, {})
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=True)  # a value that is inside itself is then an error
        except (LookupError, AttributeError, TypeError, ValueError, OverflowError) as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            problem = f"{_shown(node.value)} is no value of the type {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                problem = f"the key {_written(key)} is not text; put it in quotes"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if key.value in seen:
                problem = f"the key {key.value} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the values that a node stands for, aliases included, and how deep they are inside each other.

    Raises:
        ComposerError: They are more or deeper than in any sensible file.
    """
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = 1, 0  # what is inside itself is an error where it is constructed
    inner = node.value if isinstance(node.value, list) else []
    if isinstance(node, yaml.MappingNode):
        inner = [each for pair in inner for each in pair]
    sizes = [_measure(each, known) for each in inner]
    known[id(node)] = size, depth = (
        1 + sum(size for size, _ in sizes),
        1 + max((d for _, d in sizes), default=0),
    )
    if size > _MOST_VALUES or depth > _MOST_DEPTH + 1:
        much = (
            f"more than {_MOST_VALUES:,} values" if size > _MOST_VALUES else f"more than {_MOST_DEPTH} deep"
        )
        problem = f"its aliases stand for lists and mappings that are too large ({much}); write fewer"
        raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
    return size, depth


def _written(node: yaml.Node) -> str:
    return _shown(str(node.value))[1:-1] if isinstance(node, yaml.ScalarNode) else "at this place"


def _shown(value: str) -> str:
    return repr(value if len(value) <= _SHOWN else f"{value[:_SHOWN]}...")


class _Dumper(yaml.SafeDumper):
    """Quotes a string that either YAML 1.1 or 1.2 would read as something else."""


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?\d[\d_]*|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    (
        "float",
        r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)",
        [*"-+.0123456789"],
    ),
    ("merge", r"<<", ["<"]),
):
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Escape what YAML counts as the end of a line and PyYAML writes as it is."""
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Read decimal and hexadecimal only, since YAML 1.1 reads 010 as 8."""
    text = str(loader.construct_scalar(node)).replace("_", "")
    if len(text) > _MOST_DIGITS:
        raise ValueError("too many digits")
    return int(text, 16 if "x" in text else 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def read_yaml(path: str | os.PathLike[str], what: str) -> Any:
    """Read a file as `parse_yaml` does; `what` names it in the message where it cannot be read.

    Raises:
        ConfigError: The file is not readable, is too large, is not UTF-8, or `parse_yaml` refuses it.
    """
    try:
        with open(path, "rb") as file:  # not all of a file that turns out to be a model
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than 1 MiB, and no {what} is; check the path")
        text = content.decode()
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
    return parse_yaml(text, source=str(path))


def parse_yaml(text: str, *, source: str) -> Any:
    """Read YAML as plain values.

    Raises:
        ConfigError: The text is no YAML, has a key twice, or stands for more values than is sensible; the
            error names `source` and the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from error


def dump_yaml(value: object, *, flow: bool = False) -> str:
    """Write plain values as YAML: with `flow` on one line, otherwise as sections."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=10**6 if flow else 100,
    )
    return text.removesuffix("...\n").strip() if flow else text
