"""Seeded mutators: of bytes, of plain values, and of the JSON that such values become."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**60, 10**400),
    *(0.0, 0.5, -0.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan")),
    *("", " ", "\0", "0", "1e9", "auto", "null", "a" * 5000, "\ud800", "\u2028", "\ufeff", "{}", "%s", "{0}"),
    *("../outside", "/etc/passwd", "~", "$HOME", "..", ".", "a/../../b", "C:\\x", "http://127.0.0.1:9/x"),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": {}}}, [0] * 300, [{}], [["a", 1]], {"__class__": "x"}),
)
"""The values that code forgets: of other types, beyond every range, names that lead out, and empty ones."""

_BYTES = (
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b",",
    b":",
    b"\n",
    b"\r",
    b"-",
    b"e9",
)


def odd_value(random: Random) -> Any:
    """Return a value of its own, of any kind."""
    if random.random() < 0.1:
        return deep(random.choice((20, 70, 300)), random.choice("[{"))
    return copy.deepcopy(random.choice(ODD_VALUES))


def deep(depth: int, kind: str) -> Any:
    """Return lists, or mappings, that are inside each other."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "[" else {"a": value}
    return value


def mutated_value(random: Random, value: Any, num: int = 0) -> Any:
    """Return plain values with some of them replaced, removed, doubled, renamed, exchanged or wrapped."""
    try:
        return _mutated(random, copy.deepcopy(value), num)
    except RecursionError:  # deep values have come into each other
        return deep(300, "[")


def _mutated(random: Random, value: Any, num: int) -> Any:
    for _ in range(num or 1 + int(random.expovariate(1.0))):
        places: list[tuple[Any, Any]] = []
        _collect(value, places)
        if not places:
            return odd_value(random)
        parent, key = random.choice(places)
        change = random.randrange(7)
        if change <= 2:
            parent[key] = odd_value(random)
        elif change == 3:
            del parent[key]
        elif change == 4:
            other, at = random.choice(places)
            if at in (other if isinstance(other, dict) else range(len(other))):
                parent[key] = copy.deepcopy(other[at])
        elif change == 5:
            parent[key] = random.choice(([parent[key]], {"a": parent[key]}, str(parent[key])[:1000]))
        elif isinstance(parent, dict):
            parent[random.choice(("", "a", f"{key}s", key[:-1], key.upper(), "__proto__"))] = parent[key]
        else:
            parent.insert(key, copy.deepcopy(parent[key]))
    return value


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    """List every place of a value: its container, and the key or index there."""
    pending = [value]
    while pending and len(places) < 5000:
        each = pending.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            places.append((each, key))
            pending.append(each[key])


def mutated_bytes(random: Random, data: bytes, num: int = 0) -> bytes:
    """Return bytes of which some are flipped, cut, doubled, overwritten or put in between."""
    changed = bytearray(data)
    for _ in range(num or 1 + int(random.expovariate(0.7))):
        at = random.randrange(len(changed) + 1)
        change = random.randrange(7)
        if change <= 1 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif change == 2:
            del changed[at : at + random.choice((1, 1, 2, 8, 64, len(changed)))]
        elif change == 3:
            changed[at:at] = random.choice(_BYTES) * random.choice((1, 1, 2, 100))
        elif change == 4:
            end = at + random.randrange(64)
            changed[at:at] = changed[at:end]
        elif change == 5:
            changed[at : at + 8] = random.randbytes(min(8, len(changed) - at))
        else:
            changed[at : at + 8] = random.choice((0, 1, 2**31, 2**63 - 1, 2**64 - 1)).to_bytes(8, "little")
    return bytes(changed)


def mutated_json(random: Random, value: Any) -> bytes:
    """Return a JSON file of changed values, of changed text, or of both; sometimes of a form of its own."""
    kind = random.random()
    if kind < 0.02:
        return random.choice(
            ("[" * 100_000, '{"a":' * 50_000, "9" * 5000, "", "null", '"', "\ufeff{}")
        ).encode()
    if kind < 0.8:
        value = mutated_value(random, value)
    text = json.dumps(value)
    if kind > 0.98:
        return text.encode(random.choice(("utf-16", "utf-8-sig", "utf-32")))
    data = text.encode()
    return mutated_bytes(random, data) if kind > 0.6 else data
