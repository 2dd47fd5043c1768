"""Every setting a user has: read from YAML and overrides, checked, written out, and documented.

A `Config` is complete and checked when it exists: nothing downstream checks a type or a range again.
"""

from megatrain.config.keys import Key, config_keys
from megatrain.config.reading import (
    apply_overrides,
    build_config,
    dump_config,
    load_config,
    parse_override,
    read_config,
    set_keys,
)
from megatrain.config.sections import Config

__all__ = [
    "Config",
    "Key",
    "apply_overrides",
    "build_config",
    "config_keys",
    "dump_config",
    "load_config",
    "parse_override",
    "read_config",
    "set_keys",
]
