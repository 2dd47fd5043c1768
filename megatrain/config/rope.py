"""The scaling of rotary embeddings that a run asks for, in transformers' own words; plain values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megatrain.errors import ConfigError

YARN, LINEAR = "yarn", "linear"

_OF_YARN = (
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_KEYS = {YARN: ("factor", *_OF_YARN), LINEAR: ("factor",)}
"""What each kind of scaling has, by transformers' names."""

KIND = "a mapping such as {rope_type: yarn, factor: 4}, or null"
"""The words for the setting's values."""


def read_rope_scaling(given: object) -> dict[str, Any]:
    """Check a scaling, and return it with numbers as transformers has them.

    Args:
        given: The mapping: `rope_type` (or `type`), `factor` and, for YaRN, what transformers' configurations
            have for it.

    Raises:
        ConfigError: It is no mapping, of another kind, or a value is out of range; the sentence says which.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"it is {given!r}; it must be {KIND}")
    values = {str(key): value for key, value in given.items() if value is not None}
    kinds = [values.pop(key) for key in ("rope_type", "type") if key in values]
    if not kinds or kinds[0] != kinds[-1]:
        said = "a rope_type and another type" if kinds else "no rope_type"
        raise ConfigError(f"it has {said}; use rope_type: {YARN} or rope_type: {LINEAR}")
    kind = kinds[0]
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ConfigError(f"rope_type is {kind!r}; use {YARN} or {LINEAR}")
    unknown = sorted(values.keys() - set(_KEYS[kind]))
    if unknown:
        raise ConfigError(
            f"{unknown[0]} is not a parameter of rope_type {kind}, which has {', '.join(_KEYS[kind])}"
        )
    if "factor" not in values:
        raise ConfigError("it has no factor, the number of times the range of the model becomes longer")
    read = {key: _read(key, value) for key, value in values.items()}
    if read["factor"] < 1:
        raise ConfigError(f"factor is {read['factor']:g}; use 1 or more")
    fast, slow = read.get("beta_fast", 32.0), read.get("beta_slow", 1.0)
    if fast < slow:
        raise ConfigError(f"beta_fast is {fast:g} and beta_slow is {slow:g}; beta_fast must not be smaller")
    return {"rope_type": kind, **{key: read[key] for key in _KEYS[kind] if key in read}}


def _read(key: str, value: object) -> bool | int | float:
    if key == "truncate":
        if isinstance(value, bool):
            return value
        raise ConfigError(f"truncate is {value!r}; use true or false")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise ConfigError(f"{key} is {value!r}; use a number above 0")
    if key == "original_max_position_embeddings":
        if isinstance(value, int):
            return value
        raise ConfigError(f"{key} is {value!r}; use a whole number of tokens")
    return float(value)  # type: ignore[arg-type]


def described(parameters: Mapping[str, Any]) -> str:
    """Return the kind and the factor of a scaling in a few words, such as `yarn, factor 4`."""
    kind, factor = parameters.get("rope_type", "default"), parameters.get("factor")
    return f"{kind}, factor {factor:g}" if isinstance(factor, (int, float)) else str(kind)
