"""Names of a folder that resolve on first use (PEP 562), so that to import the folder loads nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def resolver(folder: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a folder, which keeps each name that it has resolved.

    Args:
        folder: The dotted name of the folder.
        homes: The modules of the package that have the names, each with its names; the later of two counts.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def resolve(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        value = getattr(import_module(f"megatrain.{home_of[name]}"), name)
        setattr(sys.modules[folder], name, value)
        return value

    return resolve
