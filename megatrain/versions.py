"""The version of megatrain, and of the packages that results depend on."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

__version__ = "0.1.0"


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages by name; `none` of those that are not installed.

    megatrain's own is known where it runs from its source folder, too.
    """
    found = {}
    for name in names:
        try:
            found[name] = __version__ if name == "megatrain" else metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found
