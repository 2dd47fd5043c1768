"""The configurations and model shapes that come with megatrain, each by its name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatrain.errors import ConfigError

_HERE = Path(__file__).parent


def recipes() -> dict[str, Path]:
    """Return the configurations of runs, in order: such as `finetune` or `8b-24gb`."""
    return {path.stem: path for path in sorted(_HERE.glob("*.yaml"))}


def shapes() -> dict[str, Path]:
    """Return files like a model directory's config.json, for plans: such as `llama-8b`."""
    return {path.stem: path for path in sorted(_HERE.glob("shapes/*.json"))}


def bundled() -> dict[str, Path]:
    """Return all: recipes, shapes, and files for clusters under their own names, such as `slurm.sh`."""
    return {**recipes(), **shapes(), **{path.name: path for path in sorted(_HERE.glob("clusters/*"))}}


def find(name: str, files: Mapping[str, Path]) -> Path:
    """Return the file of a name.

    Raises:
        ConfigError: There is none of this name.
    """
    if name in files:
        return files[name]
    near = difflib.get_close_matches(name, files, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"there is no file and no recipe {name!r}; {hint}bundled are {', '.join(files)}")


def place(path: str, files: Mapping[str, Path]) -> str | Path:
    """Return where a file is that a user names: a word that is no file here is the name of a bundled one.

    Raises:
        ConfigError: There is none of this name either.
    """
    is_word = os.sep not in path and not Path(path).suffix
    return find(path, files) if is_word and not os.path.exists(path) else path


def described() -> Iterator[tuple[str, str]]:
    """Yield each recipe with its first line."""
    for name, path in recipes().items():
        yield name, path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
