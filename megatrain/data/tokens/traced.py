"""A string type that knows the origin of each character: its message, and the value that it repeats.

A chat template is a program over strings. To it, `Traced` is a string that equals the plain one in every
test, comparison and length, so that a template writes the same text with it. Its methods that cut, join and
change letters do the same to the runs of one origin that it keeps. An operation that does not know it gives
plain text: a trace can be lost, but the text cannot change.

Source: the idea is dynamic taint tracking, as in Perl's taint mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, SupportsIndex

Run = tuple[int, int, int]
"""The number of characters, the message that they were written for, and the value that they repeat, or 0."""
Runs = tuple[Run, ...]


class Traced(str):
    """A string and the origins of its characters."""

    __slots__ = ("runs",)
    runs: Runs

    def __new__(cls, text: str, runs: Runs) -> Traced:
        """Trace a text; the runs have its length."""
        self = str.__new__(cls, text)
        self.runs = runs
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        if isinstance(other, str):
            return Traced(str.__add__(self, other), (*self.runs, *runs_of(other)))
        return NotImplemented

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, str):
            return Traced(str.__add__(other, self), (*runs_of(other), *self.runs))
        return NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        if not isinstance(key, slice):
            return text
        start, stop, step = key.indices(len(self))
        return self._part(start, max(start, stop)) if step == 1 else text

    def _part(self, start: int, stop: int) -> Traced:
        runs: list[Run] = []
        place = 0
        for length, owner, value in self.runs:
            cut = min(stop, place + length) - max(start, place)
            if cut > 0:
                runs.append((cut, owner, value))
            place += length
        return Traced(super().__getitem__(slice(start, stop)), tuple(runs))

    # -- parts -----------------------------------------------------------------------------------------------

    def strip(self, chars: str | None = None) -> str:
        """Do as `str` does, with traces."""
        left = len(self) - len(super().lstrip(chars))
        return self._part(left, max(left, len(super().rstrip(chars))))

    def lstrip(self, chars: str | None = None) -> str:
        """Do as `str` does, with traces."""
        return self._part(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:
        """Do as `str` does, with traces."""
        return self._part(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str) -> str:
        """Do as `str` does, with traces."""
        return self._part(len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str) -> str:
        """Do as `str` does, with traces."""
        return self._part(0, len(super().removesuffix(suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        """Do as `str` does, with traces."""
        return self._parts(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        """Do as `str` does, with traces."""
        return self._parts(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Any]:
        """Do as `str` does, with traces."""
        lines = self._parts(super().splitlines(True), "")
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str) -> tuple[Any, Any, Any]:
        """Do as `str` does, with traces."""
        head, between, tail = self._parts(super().partition(sep), "")
        return head, between, tail

    def rpartition(self, sep: str) -> tuple[Any, Any, Any]:
        """Do as `str` does, with traces."""
        head, between, tail = self._parts(super().rpartition(sep), "")
        return head, between, tail

    def _parts(self, parts: Iterable[str], between: str | None) -> list[Traced]:
        """Trace consecutive parts of this text, separated by `between`; None stands for white space."""
        found: list[Traced] = []
        place = 0
        for part in parts:
            place = self.index(part, place) if between is None else place
            found.append(self._part(place, place + len(part)))
            place += len(part) + len(between or "")
        return found

    # -- changes ---------------------------------------------------------------------------------------------

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        """Do as `str` does, with traces."""
        return joined(self.split(old, count), new) if old else super().replace(old, new, count)

    def join(self, values: Iterable[str]) -> str:
        """Do as `str` does, with traces."""
        return joined(list(values), self)

    def upper(self) -> str:
        """Do as `str` does, with traces."""
        return self._changed(super().upper())

    def lower(self) -> str:
        """Do as `str` does, with traces."""
        return self._changed(super().lower())

    def title(self) -> str:
        """Do as `str` does, with traces."""
        return self._changed(super().title())

    def capitalize(self) -> str:
        """Do as `str` does, with traces."""
        return self._changed(super().capitalize())

    def _changed(self, text: str) -> str:
        """Trace a text with changed letters; a text of another length becomes plain."""
        return Traced(text, self.runs) if len(text) == len(self) else text


def runs_of(text: str) -> Runs:
    """Return the origins of a text; those of a plain one are unknown."""
    return text.runs if isinstance(text, Traced) else ((len(text), 0, 0),)


def traced_json(text: str, value: Any, *, sort_keys: bool, **options: Any) -> str:
    """Trace JSON text of a value, since the strings of both come in one order."""

    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for key in sorted(value) if sort_keys else value:
                yield from (str(key), *strings(value[key]))
        elif isinstance(value, (list, tuple)):
            yield from chain.from_iterable(map(strings, value))

    parts: list[str] = []
    place = 0
    for string in strings(value):
        written = json.dumps(string, **options)
        start = text.find(written, place)
        if start < 0:
            return text
        inner, origins = written[1:-1], {run[1:] for run in runs_of(string)}
        if inner == string:
            inner = string
        elif len(origins) == 1:
            inner = Traced(inner, ((len(inner), *origins.pop()),))
        parts += [text[place : start + 1], inner, '"']
        place = start + len(written)
    return joined([*parts, text[place:]])


def joined(parts: Sequence[str], between: str = "") -> str:
    """Join texts, and their traces if any of them has one."""
    if between:
        parts = [text for part in parts for text in (between, part)][1:]
    text = "".join(parts)
    if not any(isinstance(part, Traced) for part in parts):
        return text
    return Traced(text, tuple(chain.from_iterable(map(runs_of, parts))))
