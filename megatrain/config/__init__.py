"""Every setting of a user: it is read from YAML and overrides, checked, written out, and documented.

A `Config` is complete and checked when it exists: nothing downstream checks a type or a range again. The
names resolve on first use (PEP 562): `megatrain.config.choice` loads no more than itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.lazy import resolver

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


__getattr__ = resolver(
    __name__,
    {
        "config.reading": __all__,
        "config.sections.config": ("Config",),
        "config.keys": ("Key", "config_keys"),
    },
)
