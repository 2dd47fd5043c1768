"""The settings of a command: a file, overrides and flags, combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.config import Config


def given_settings(arguments: Sequence[str] | None, flags: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the nested settings of a command line, and what they are called in errors.

    Args:
        arguments: The file, if there is one, and overrides.
        flags: The values of options by the key that each sets; those of None were not given.
    """
    from megatrain.config import combine_settings

    given = {key: value for key, value in flags.items() if value is not None}
    raw, source = combine_settings(arguments or [], given)
    return raw, source or "command line"


def read_settings(arguments: Sequence[str] | None, flags: Mapping[str, Any]) -> Config:
    """Combine the arguments of `train`: at most one file, overrides, and flags by the key that each sets."""
    from megatrain.config import build_config

    raw, source = given_settings(arguments, flags)
    return build_config(raw, source=source)
