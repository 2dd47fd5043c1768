"""Settings are read from YAML and overrides, checked, and written out here."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatrain.config.aliases import LEFT_OUT, hint, is_foreign, trainer_of, translate
from megatrain.config.decided import step_problems
from megatrain.config.keys import describe, given
from megatrain.config.sections.config import Config, conflicts
from megatrain.config.yaml12 import dump_yaml, parse_yaml, read_yaml
from megatrain.errors import ConfigError
from megatrain.recipes import place, recipes

_log = logging.getLogger(__name__)

_MOST_SHOWN = 30
"""The number of problems that are listed; a list of values may have one for each of them."""

_OF_DATA = (".txt", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz")
"""The endings of names that a CONFIG never has."""


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML configuration file as nested keys, aliases replaced; `build_config` checks them.

    Args:
        path: The path of a file, or the name of a bundled recipe.

    Raises:
        ConfigError: The file is not readable, is no YAML, has a key twice, or is no mapping.
    """
    if Path(path).suffix in _OF_DATA:
        raise ConfigError(
            f"{path} is no CONFIG, which is YAML; data is given as --data {path}, or as data.path"
        )
    raw = read_yaml(place(os.fspath(path), recipes()), "configuration")
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path} must have sections ({', '.join(Config.model_fields)}), and it is {given(raw)}"
        )
    trainer = trainer_of(raw)
    if trainer is not None:
        raise ConfigError(
            f"{path} is a file of {trainer}; make it ours by `megatrain import {path} --out mine.yaml`"
        )
    return _expand_aliases(raw, source=str(path))


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return `raw` with `a.b=value` overrides applied; values are YAML scalars, lists or mappings.

    Raises:
        ConfigError: An override has no `=` or an unreadable value, or two set one key.
    """
    return set_keys(raw, [parse_override(override) for override in overrides])


def combine_settings(arguments: Sequence[str], flags: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Combine arguments of a command line: at most one file, overrides, and flags by the key that each sets.

    Returns:
        The nested keys, and the file that they begin with, which is empty if there is none.

    Raises:
        ConfigError: There are two files, or `read_config` or `set_keys` refuses something.
    """
    files = [argument for argument in arguments if "=" not in argument]
    if len(files) > 1:
        raise ConfigError(
            f"one CONFIG at a time, not {' and '.join(files)}; overrides have the form section.key=value"
        )
    raw = read_config(files[0]) if files else {}
    overrides = [parse_override(argument) for argument in arguments if "=" in argument]
    return set_keys(raw, [*flags.items(), *overrides]), files[0] if files else ""


def set_keys(raw: Mapping[str, Any], settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return `raw` with each dotted key of `settings` (or its alias) set to its value."""
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    spelled: dict[str, str] = {}
    for spelling, value in settings:
        key, value = translate(spelling, value)
        if value is LEFT_OUT:
            continue
        if key in spelled:
            both = "" if spelling == spelled[key] else f" (as {spelled[key]} and as {spelling})"
            raise ConfigError(f"{key} is set twice on the command line{both}; keep one")
        spelled[key] = spelling
        *sections, leaf = key.split(".")
        target = result
        for section in sections:
            inner = target.get(section)
            # An unknown or misplaced section is kept, since `build_config` names it with all problems.
            target[section] = inner = dict(inner) if isinstance(inner, Mapping) else {}
            target = inner
        target[leaf] = value
    foreign = [hint(spelling, value) for spelling, value in settings if is_foreign(spelling, value)]
    if foreign:
        _log.info("names of transformers: %s", ", ".join(foreign))
    return result


def replace_settings(arguments: Sequence[str], settings: Mapping[str, str]) -> list[str]:
    """Return arguments of `combine_settings` in which these values of keys replace earlier ones."""
    overrides = {argument: parse_override(argument) for argument in arguments if "=" in argument}
    replaced = {
        argument for argument, (key, value) in overrides.items() if translate(key, value)[0] in settings
    }
    kept = [argument for argument in arguments if argument not in replaced]
    return [*kept, *(f"{key}={value}" for key, value in settings.items())]


def build_config(raw: Mapping[str, Any], *, source: str = "configuration") -> Config:
    """Check nested keys and fill in the defaults.

    Args:
        raw: The sections of keys, as `read_config` and `apply_overrides` return them.
        source: The origin of the settings, which is named in every problem.

    Raises:
        ConfigError: The settings have problems, all listed: unknown keys, wrong types, values out of range,
            missing keys.
    """
    try:
        # A section that is left empty in YAML reads as null, and means its defaults.
        config = Config.model_validate(
            {key: {} if _is_empty(key, value) else value for key, value in raw.items()}
        )
    except ValidationError as error:
        problems = [describe(problem) for problem in error.errors()]
        raise _as_error(
            source, list(dict.fromkeys(problems))
        ) from None  # pydantic has an error for each possible kind
    problems = [*conflicts(config), *step_problems(config)]
    if not problems:
        return config
    raise _as_error(source, problems)


def _is_empty(key: str, value: object) -> bool:
    """Return whether a section says nothing; `memory: auto` says that all of it is planned."""
    return (value is None and key != "out") or (key == "memory" and value == "auto")


def _as_error(source: str, problems: Sequence[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(f"{source}: {problems[0]}")
    shown, num_more = problems[:_MOST_SHOWN], len(problems) - _MOST_SHOWN
    more = [f"and {num_more} more"] if num_more > 0 else []
    return ConfigError("\n  - ".join([f"{source} has {len(problems)} problems:", *shown, *more]))


def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Read, override and check a configuration file.

    Raises:
        ConfigError: `read_config`, `apply_overrides` or `build_config` raises it.
    """
    return build_config(apply_overrides(read_config(path), overrides), source=str(path))


def dump_config(config: Config) -> str:
    """Return `config` as YAML with every default written out; `load_config` reads the same value back."""
    return dump_yaml(config.model_dump(mode="json"))


def parse_override(override: str) -> tuple[str, Any]:
    """Split `a.b=value` into its key and its value, read as YAML.

    Raises:
        ConfigError: There is no `=`, no key, or a value that is not YAML.
    """
    key, equals, text = override.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"the override {override!r} is not of the form section.key=value")
    try:
        return key, parse_yaml(text, source=override)
    except ConfigError as error:
        raise ConfigError(
            f"the override {override!r} has no readable value; quote it: {key}='\"...\"'"
        ) from error


def _expand_aliases(raw: Mapping[Any, Any], *, source: str) -> dict[str, Any]:
    """Move top-level aliases to their nested keys; a nested key that is given as well is a conflict."""
    nested = {key: value for key, value in raw.items() if not is_foreign(key, value)}
    aliased = [(key, value) for key, value in raw.items() if is_foreign(key, value)]
    given = {key for key, value in nested.items() if not isinstance(value, dict)}
    given |= {f"{key}.{inner}" for key, value in nested.items() if isinstance(value, dict) for inner in value}
    spelled: dict[str, str] = {}
    for spelling, value in aliased:
        key, read = translate(spelling, value)
        if read is LEFT_OUT:
            continue
        other = key if key in given else spelled.get(key)
        if other:
            raise ConfigError(f"{source}: {spelling} and {other} both set {key}; keep one")
        spelled[key] = spelling
    return set_keys(nested, aliased)
