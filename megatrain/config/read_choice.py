"""The reader of a choice from fields by name checks their values. It loads neither pydantic nor torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from megatrain.config.choice import BOUNDARIES, GRADIENTS, SUMS, Choice, Updates
from megatrain.config.policies import read_policy
from megatrain.errors import ConfigError

_PLANES = ("working", "remainder", "moments")
_TIER_PAIRS = [(plane, tier) for plane in _PLANES for tier in ("ram", "nvme")]

_LEAST = {
    "num_slots": 1,
    "num_gradient_buffers": 1,
    "expert_chunks": 1,
    "resident_layers": 0,
    "lockstep": 1,
    "blocks_in_ram": 0,
    "weights_in_ram": 0,
    "head_chunk_tokens": 1,
}
_ALLOWED: Mapping[str, Sequence[Any]] = {
    "boundaries": BOUNDARIES,
    "fragments": (False, True),
    "outer_resident": (False, True),
    "outer_streams": (False, True),
    "mirror_resident": (False, True),
    "sums": SUMS,
    "updates": [schedule.value for schedule in Updates],
}


def read_choice(choice: Choice | None, values: Mapping[str, Any]) -> Choice:
    """Join a choice with further fields by name, and check every value.

    Raises:
        ConfigError: A field is unknown or given twice, or a value is out of range.
    """
    choice = Choice() if choice is None else choice
    names = [field.name for field in fields(Choice)]
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"a choice has {', '.join(names)}"
            raise ConfigError(f"there is no setting {name}; {hint}")
        if name in choice.given:
            raise ConfigError(f"{name} is given twice, in the choice and by itself; keep one")
    return checked(replace(choice, **{name: _value(value) for name, value in values.items()}))


def as_values(choice: Choice) -> dict[str, Any]:
    """Return the decided fields as plain JSON values, from which `from_values` makes a choice."""
    given = choice.given
    return given | ({"tiers": sorted(map(list, given["tiers"]))} if "tiers" in given else {})


def from_values(values: Mapping[str, Any]) -> Choice:
    """Make a choice from the result of `as_values`."""
    read: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    if "tiers" in read:
        read["tiers"] = frozenset(map(tuple, read["tiers"]))
    return Choice(**read)


def checked(choice: Choice) -> Choice:
    """Return a choice whose decided fields have possible values.

    Raises:
        ConfigError: A decided field has an impossible value.
    """
    given = choice.given
    activations = given.get("activations", ())
    for name in (activations,) if isinstance(activations, str) else activations:
        read_policy(name, "activations")
    gradients = given.get("gradients", ())
    for name in (gradients,) if isinstance(gradients, str) else gradients:
        if name not in GRADIENTS:
            raise ConfigError(f"gradients is {name!r}; use {', '.join(GRADIENTS)} or auto")
    for name, least in _LEAST.items():
        value = given.get(name, least)
        is_free = value is None and name == "head_chunk_tokens"
        if not is_free and (type(value) is not int or value < least):
            raise ConfigError(f"{name} is {value!r}; use {least} or more, or auto")
    for pair in _pairs(given.get("tiers", ())):
        if pair not in _TIER_PAIRS:
            raise ConfigError(
                f"tiers has {pair!r}; use pairs of a plane ({', '.join(_PLANES)}) and a tier (ram or nvme), "
                "such as tiers=frozenset({('moments', 'nvme')})"
            )
    for name, allowed in _ALLOWED.items():
        if name in given and given[name] not in allowed:
            values = [repr(value) if isinstance(value, bool) else value for value in allowed]
            raise ConfigError(f"{name} is {given[name]!r}; use {', '.join(values)} or auto")
    return choice


def _pairs(tiers: object) -> list[object]:
    """List the pairs of a choice's tiers; anything but a set of pairs is returned to be refused."""
    return list(tiers) if isinstance(tiers, (frozenset, tuple)) else [tiers]


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
