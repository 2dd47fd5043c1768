"""The descriptions of settings, for help, documentation, and errors about wrong values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from megatrain.config.aliases import ALIASES
from megatrain.config.sections.config import Config
from megatrain.config.yaml12 import dump_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One setting, as help, documentation and errors show it."""

    name: str
    kind: str
    """The description of its values."""
    default: str
    """The default as YAML, or "required" if there is none."""
    description: str


@cache
def config_keys() -> Mapping[str, Key]:
    """Return every setting by its dotted name, in the order of the sections."""
    return {key.name: key for key in _keys(Config, "")}


def _keys(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    schemas = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
            continue
        yield Key(
            name=prefix + name,
            kind=_kind_of(schemas[name]),
            default="required" if field.is_required() else dump_yaml(field.default, flow=True),
            description=" ".join((field.description or "").split()),
        )


def _kind_of(schema: Mapping[str, Any]) -> str:
    if "kind" in schema:
        return str(schema["kind"])
    if "anyOf" in schema:
        return " or ".join(_kind_of(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kinds = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    kind = (kinds | {"object": "a mapping", "null": "null"})[schema["type"]]
    for bound, words in (("minimum", "{} or more"), ("exclusiveMinimum", "above {}")):
        if bound in schema:
            kind += f" ({words.format(schema[bound])})"
    return kind


def given(value: object) -> str:
    """Return a value as a user has written it, with its kind."""
    kinds = {bool: "", int: "whole number", float: "number", str: "text", dict: "section", list: "list"}
    text = dump_yaml(value, flow=True) if isinstance(value, (bool, int, float)) else repr(value)
    kind = kinds.get(type(value), type(value).__name__)
    text = text if len(text) <= 60 else text[:57] + "..."
    return "null" if value is None else f"{text} ({kind})" if kind else text


def describe(problem: Any) -> str:
    """Describe a fault that pydantic found in words."""
    name = str(problem["loc"][0]) + "".join(f".{part}" for part in problem["loc"][1:2])
    key = config_keys().get(name)
    if problem["type"] == "extra_forbidden":
        return f"there is no key {name}; {_suggestion(name)}"
    if problem["type"] == "missing":
        required = [known for known in config_keys().values() if known.default == "required"]
        return "; ".join(
            f"{known.name} is required (--{known.name.split('.')[0]}, or {known.name}=...): "
            f"{known.description.split('. ')[0]}"
            for known in required
            if known.name == name or known.name.startswith(name + ".")
        )
    if key is None:
        inner = ", ".join(
            known.removeprefix(name + ".") for known in config_keys() if known.startswith(name + ".")
        )
        return f"{name} is {given(problem['input'])}; it must be a section with keys from {inner}"
    kind = key.kind.replace(" | ", " or ")
    where = "".join(f"[{part}]" for part in problem["loc"][2:] if isinstance(part, int))
    if problem["type"] == "said":  # the setting's own reader knows more than its kind
        return f"{name}{where}: {problem['msg']}"
    is_text = problem["type"] == "string_type" and problem["input"] is not None and " | " not in key.kind
    hint = "; put it in quotes" if is_text else ""
    return f"{name}{where} is {given(problem['input'])}; it must be {kind}{hint}"


def suggested_key(name: str) -> str | None:
    """Return the key that a wrong one, or a name of transformers, most likely means."""
    keys = list(config_keys())
    leaf = name.rpartition(".")[2]
    by_leaf = {key.rpartition(".")[2]: key for key in keys}
    targets = {**{key: key for key in keys}, **ALIASES}
    close = [name] if name in targets else [leaf] if leaf in targets or leaf in by_leaf else []
    close = close or difflib.get_close_matches(name, targets, n=1, cutoff=0.75)
    close = close or difflib.get_close_matches(leaf, by_leaf, n=1)
    return (targets.get(close[0]) or by_leaf[close[0]]) if close else None


def _suggestion(name: str) -> str:
    key = suggested_key(name)
    if key is not None:
        return f"did you mean {key}?"
    section = name.rpartition(".")[0]
    inside = [key.removeprefix(f"{section}.") for key in config_keys() if key.startswith(f"{section}.")]
    return (
        f"{section} has {', '.join(inside)}"
        if section and inside
        else f"the sections are {', '.join(Config.model_fields)}"
    )
