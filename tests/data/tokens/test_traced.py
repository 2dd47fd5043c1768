"""A traced string is the plain one in all it does, and every character of what it gives keeps its origin."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data.tokens.traced import Traced, joined, runs_of, traced_json

TEXTS = st.text(alphabet="aAb \n\t<>\u00e9\U0001f600\x85", max_size=24)
SMALL = st.sampled_from(["a", " ", "\n", "<", "ab", "b ", "A"])

OPERATIONS: dict[str, Callable[[str, str, int], Any]] = {
    "strip": lambda text, one, n: [text.strip(), text.strip(one)],
    "lstrip": lambda text, one, n: [text.lstrip(), text.lstrip(one)],
    "rstrip": lambda text, one, n: [text.rstrip(), text.rstrip(one)],
    "removeprefix": lambda text, one, n: text.removeprefix(one),
    "removesuffix": lambda text, one, n: text.removesuffix(one),
    "split": lambda text, one, n: [text.split(), text.split(one), text.split(one, n), text.split(None, n)],
    "rsplit": lambda text, one, n: [
        text.rsplit(),
        text.rsplit(one),
        text.rsplit(one, n),
        text.rsplit(None, n),
    ],
    "splitlines": lambda text, one, n: [text.splitlines(), text.splitlines(True)],
    "partition": lambda text, one, n: [*text.partition(one), *text.rpartition(one)],
    "slices": lambda text, one, n: [text[n:], text[:n], text[-n:], text[n : n + 3], text[3:1]],
    "replace": lambda text, one, n: [
        text.replace(one, "--"),
        text.replace(one, "", n),
        text.replace("", "-"),
    ],
    "add": lambda text, one, n: [one + text, text + one, text + text],
    "join": lambda text, one, n: [text.join([one, "x", one]), text.join([])],
    "other": lambda text, one, n: [
        text[::-1],
        text[0:9:2],
        text * 2,
        f"{text}",
        text.center(9),
        text.zfill(9),
    ],
    "compare": lambda text, one, n: [len(text), hash(text), bool(text), one in text, text.startswith(one)],
}


def traced(text: str) -> Traced:
    """Give every character a value of its own: its place, from 1 on."""
    return Traced(text, tuple((1, 0, place) for place in range(1, len(text) + 1)))


def check(made: Any, plain: Any, origin: str) -> None:
    """What is traced has the text of the plain one, and each character the one of its place."""
    if isinstance(plain, (list, tuple)):
        assert len(made) == len(plain)
        for one, other in zip(made, plain, strict=True):
            check(one, other, origin)
        return
    assert made == plain
    if isinstance(made, Traced):
        assert sum(length for length, _, _ in made.runs) == len(made)
        values = [value for length, _, value in made.runs for _ in range(length)]
        for character, value in zip(plain, values, strict=True):
            assert not value or character == origin[value - 1]


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=30)
@given(text=TEXTS, one=SMALL, number=st.integers(0, 4))
def test_a_traced_string_does_what_a_plain_one_does(name: str, text: str, one: str, number: int) -> None:
    operation = OPERATIONS[name]
    check(operation(traced(text), one, number), operation(text, one, number), text)


@settings(max_examples=30)
@given(text=TEXTS)
def test_letters_change_in_their_places(text: str) -> None:
    for name in ("upper", "lower", "title", "capitalize"):
        made = getattr(traced(text), name)()
        assert made == getattr(text, name)()
        assert not isinstance(made, Traced) or made.runs == traced(text).runs
    check(traced("ab").upper().lower(), "ab", "ab")


def test_what_is_kept_of_a_trace() -> None:
    """The operations of templates lose nothing: this fails where one falls back to plain text."""
    text = Traced("ab cd", ((5, 0, 7),))
    made = [text.strip(), text.split()[1], text.replace(" ", "-"), "<" + text, text[1:], joined(["x", text])]
    runs = [runs_of(one) for one in [*made, text.upper()]]
    assert [sum(length for length, _, value in some if value == 7) for some in runs] == [5, 2, 4, 5, 4, 5, 5]


@settings(max_examples=30)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=6,
    ),
    sort_keys=st.booleans(),
    ensure_ascii=st.booleans(),
)
def test_json_text_keeps_the_origin_of_strings(value: Any, sort_keys: bool, ensure_ascii: bool) -> None:
    def mark(part: Any) -> Any:
        if isinstance(part, str):
            strings.append(part)
            return Traced(part, ((len(part), 0, len(strings)),) if part else ())
        if isinstance(part, dict):
            return {key: mark(inner) for key, inner in (sorted(part.items()) if sort_keys else part.items())}
        return [mark(inner) for inner in part] if isinstance(part, list) else part

    strings: list[str] = []
    text = json.dumps(value, sort_keys=sort_keys, ensure_ascii=ensure_ascii)
    made = traced_json(text, mark(value), sort_keys=sort_keys, ensure_ascii=ensure_ascii)
    assert made == text
    place, found = 0, []
    for length, _, number in made.runs if isinstance(made, Traced) else ():
        if number:
            found.append((number, json.loads(f'"{text[place : place + length]}"')))
        place += length
    if isinstance(made, Traced):
        whole = [
            (number, "".join(part for n, part in found if n == number)) for number in {n for n, _ in found}
        ]
        assert sorted(whole) == [(n, part) for n, part in enumerate(strings, start=1) if part]
    else:
        assert not any(strings)
