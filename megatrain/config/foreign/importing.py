"""`megatrain import` turns a file of another trainer into our YAML, and lists left-out keys with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config.aliases import trainer_of
from megatrain.config.foreign import axolotl, llamafactory
from megatrain.config.foreign.translation import Translation
from megatrain.config.reading import build_config, set_keys
from megatrain.config.yaml12 import dump_yaml, read_yaml
from megatrain.errors import ConfigError

_TRAINERS = {"LLaMA-Factory": llamafactory, "axolotl": axolotl}


@dataclass(frozen=True)
class Imported:
    """The result of translating a file of another trainer."""

    trainer: str
    settings: Mapping[str, Any]
    """The nested settings, as a CONFIG has them."""
    left_out: tuple[str, ...]
    """The sentences about left-out keys, each with the reason."""

    def yaml(self, source: str) -> str:
        """Return our file, with its origin and the left-out keys as comments."""
        lines = [f"# From {source}, a file of {self.trainer}, by megatrain import."]
        if self.left_out:
            lines += ["# Left out:", *(f"#   {line}" for line in self.left_out)]
        return "\n".join(lines) + "\n\n" + dump_yaml(self.settings)


def import_file(path: Path) -> Imported:
    """Translate a training file of LLaMA-Factory or axolotl.

    Raises:
        ConfigError: The file cannot be read, is of neither trainer, or trains in a way that is not supported.
    """
    theirs = read_yaml(path, "file")
    if not isinstance(theirs, dict):
        raise ConfigError(f"{path} has no keys and values of a training file")
    return import_settings(theirs, source=str(path))


def import_settings(theirs: Mapping[str, Any], *, source: str) -> Imported:
    """Translate settings of LLaMA-Factory or axolotl; the arguments and errors are those of `import_file`."""
    trainer = trainer_of(theirs)
    if trainer is None:
        raise ConfigError(
            f"{source} is a training file of neither LLaMA-Factory (model_name_or_path, dataset, ...) nor "
            "axolotl (base_model, datasets, ...)"
        )
    translation = Translation(dict(theirs))
    try:
        _TRAINERS[trainer].translate(translation)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        # the value is no such number, list or mapping
        key, value = translation.newest
        raise ConfigError(f"{source}: {key} is {value!r}, which {trainer} does not take there") from error
    settings = set_keys({}, list(translation.settings.items()))
    build_config(settings, source=source)  # faults of the settings are reported here, and not by `train`
    left_out = tuple(_sentence(*entry) for entry in translation.left_out)
    return Imported(trainer, settings, left_out)


def _sentence(key: str, value: Any, reason: str) -> str:
    shown = dump_yaml(value, flow=True) if isinstance(value, (bool, int, float)) else str(value)
    shown = " ".join(shown.split())
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{key}: {shown} ({reason})"
