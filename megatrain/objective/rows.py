"""Kinds of rows: what an example says of answers, and how many sequences of a row that makes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKind:
    """What the rows of an objective hold."""

    way: str | None = None
    """The name under which prepared rows of this kind are kept; None: `data.packing` names one."""
    held: str
    """What data of this kind hold, in words."""
    one: str | None = None
    """What one row is called; None: it is a sequence."""
    sequences: int = 1
    """The number of sequences in a row, which stay together in one micro-batch."""
    borrows: bool = False
    """Whether the second sequence of a row has the answer of another row."""

    @property
    def is_judged(self) -> bool:
        """Whether somebody has judged the answers."""
        return self.one is not None


TEXTS = RowKind(held="texts or answers that nobody has judged")
PAIRS = RowKind(way="dpo", held="preference pairs", one="pair", sequences=2)
MARKED = RowKind(way="kto", held="answers marked good or bad (KTO)", one="answer", sequences=2, borrows=True)


def kind_of(way: str) -> RowKind:
    """Return the kind of rows that are packed in a way."""
    return next((kind for kind in (PAIRS, MARKED) if kind.way == way), TEXTS)
