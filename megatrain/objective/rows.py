"""Kinds of rows: the form of an example's answers, and the number of sequences that a row makes of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKind:
    """The kind of the rows of an objective."""

    way: str | None = None
    """The name under which prepared rows of this kind are kept; None leaves it to `data.packing`."""
    held: str
    """The description of data of this kind."""
    one: str | None = None
    """The noun for one row; None means that it is a sequence."""
    sequences: int = 1
    """The number of sequences in a row, which stay together in one micro-batch."""
    borrows: bool = False
    """Whether the second sequence of a row has the answer of another row."""

    @property
    def is_judged(self) -> bool:
        """Return whether the answers have been judged."""
        return self.one is not None


TEXTS = RowKind(held="texts or answers that nobody has judged")
PAIRS = RowKind(way="dpo", held="preference pairs", one="pair", sequences=2)
MARKED = RowKind(way="kto", held="answers marked good or bad (KTO)", one="answer", sequences=2, borrows=True)


def kind_of(way: str) -> RowKind:
    """Return the kind of rows that are packed in a way."""
    return next((kind for kind in (PAIRS, MARKED) if kind.way == way), TEXTS)
