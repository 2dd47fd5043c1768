"""Every setting of a user: it is read from YAML and overrides, checked, written out, and documented.

A `Config` is complete and checked when it exists: nothing downstream checks a type or a range again. The
names resolve on first use (PEP 562): `megatrain.config.choice` loads no more than itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.config.keys import Key, config_keys
    from megatrain.config.reading import (
        apply_overrides,
        build_config,
        combine_settings,
        dump_config,
        load_config,
        parse_override,
        read_config,
        replace_settings,
        set_keys,
    )
    from megatrain.config.sections.config import Config

_HOMES = {"Config": "sections.config", "Key": "keys", "config_keys": "keys"}
"""The module of each name that is not in `reading`."""

__all__ = [
    "Config",
    "Key",
    "apply_overrides",
    "build_config",
    "combine_settings",
    "config_keys",
    "dump_config",
    "load_config",
    "parse_override",
    "read_config",
    "replace_settings",
    "set_keys",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'megatrain.config' has no attribute {name!r}")
    value = getattr(import_module(f"megatrain.config.{_HOMES.get(name, 'reading')}"), name)
    globals()[name] = value
    return value
