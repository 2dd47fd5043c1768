"""Packing turns documents of words into rows of one length: joined and cut, packed best-fit, or one to a row.

Joined rows hold whole and cut documents that see each other, and need no padding. In rows packed best-fit, no
token sees another document: positions begin at 0 with each document, and the rest of a row is filled. Both
hold a bounded number of tokens at a time, whatever the data's size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatrain.data.flagged_tokens import START, TRAINED, Words, num_trained

_TOKENS_AT_ONCE = 1 << 22
"""The number of tokens that best-fit packing holds and arranges at a time: 16 MiB. Rows of many short
documents are more than 99 % full with far fewer."""
_ROWS_AT_ONCE = 8
"""The rows that it arranges at least, if they are so long that they are more tokens than that."""
_FEW_ROWS = 64
"""Where so many rows at a time or fewer are arranged, the emptiest waits for more documents: it would be too
large a part of all."""


def split_long(words: Words, seq_len: int, way: str) -> tuple[list[Words], int]:
    """Make a document fit into rows.

    Args:
        words: The words of the document.
        seq_len: The number of tokens of a row.
        way: The treatment of a longer document: `split` into pieces that cannot see each other, `truncate` at
            the end, or `drop`.

    Returns:
        The pieces that have tokens to train on, and the number of tokens that were cut off or left out.
    """
    pieces = [words]
    if len(words) > seq_len:
        ends = {"split": len(words), "truncate": seq_len, "drop": 0}[way]
        pieces = [words[first : min(first + seq_len, ends)] for first in range(0, ends, seq_len)]
    for number, piece in enumerate(pieces[1:], start=1):
        pieces[number] = piece = piece.copy()
        piece[0] = (piece[0] & ~TRAINED) | START
    kept = [piece for piece in pieces if num_trained(piece)]
    return kept, len(words) - sum(map(len, kept))


class Packer(ABC):
    """Turns documents into rows."""

    def __init__(self, seq_len: int, tokens_at_once: int) -> None:
        """Make an empty packer.

        Args:
            seq_len: The number of tokens of a row.
            tokens_at_once: The number of tokens that are arranged at a time, if a row has no more.
        """
        self._seq_len, self._at_once = seq_len, max(seq_len, tokens_at_once)
        self._held: list[Words] = []
        self._num_held = 0
        self.num_filled = 0
        """The number of tokens of the rows that belong to no document."""

    def add(self, words: Words) -> Iterator[NDArray[np.int32]]:
        """Take a document; yield (num_rows, seq_len) rows that are ready."""
        self._held.append(words)
        self._num_held += len(words)
        if self._num_held >= self._at_once:
            yield from self._ready()

    def _ready(self) -> Iterator[NDArray[np.int32]]:
        """Yield the rows of which documents that come later change none."""
        yield from self.finish()

    @abstractmethod
    def finish(self) -> Iterator[NDArray[np.int32]]:
        """Yield the rows that are left."""


class Joining(Packer):
    """Joins documents and cuts them into rows; the last partial row is dropped, and no token has a flag."""

    def __init__(self, seq_len: int) -> None:
        super().__init__(seq_len, _TOKENS_AT_ONCE // 4)

    def finish(self) -> Iterator[NDArray[np.int32]]:
        """Yield the rows that are left."""
        num_rows = self._num_held // self._seq_len
        if num_rows == 0:
            return
        joined = np.concatenate(self._held)
        used = num_rows * self._seq_len
        self._held, self._num_held = [joined[used:].copy()], len(joined) - used
        yield joined[:used].reshape(num_rows, self._seq_len)


class BestFit(Packer):
    """Puts each document into the fullest row that has room for it, the longest first."""

    def __init__(self, seq_len: int, fill_id: int, *, tokens_at_once: int | None = None) -> None:
        """Make an empty packer.

        Args:
            seq_len: The number of tokens of a row.
            fill_id: The id of the token that fills rows up.
            tokens_at_once: The number of tokens that are arranged at a time, if a row has no more; None takes
                enough for rows that are nearly full.
        """
        super().__init__(seq_len, tokens_at_once or max(_TOKENS_AT_ONCE, _ROWS_AT_ONCE * seq_len))
        self._fill_id = fill_id

    def finish(self) -> Iterator[NDArray[np.int32]]:
        """Yield the rows that are left."""
        yield from self._packed(self._arrange())

    def _ready(self) -> Iterator[NDArray[np.int32]]:
        rows = self._arrange()
        waiting = self._emptiest(rows) if 1 < len(rows) <= _FEW_ROWS else []
        held = [self._held[number] for number in waiting]
        yield from self._packed([row for row in rows if row is not waiting])
        self._held, self._num_held = held, sum(map(len, held))

    def _emptiest(self, rows: Sequence[list[int]]) -> list[int]:
        """Return the documents of the row that has the most room, the last one of several."""
        return min(reversed(rows), key=lambda row: sum(len(self._held[number]) for number in row))

    def _packed(self, rows: Sequence[Sequence[int]]) -> Iterator[NDArray[np.int32]]:
        """Yield rows of documents that are held, and hold none from then on."""
        size = self._at_once // self._seq_len
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            packed = np.full((len(some), self._seq_len), self._fill_id, dtype=np.int32)
            for row, documents in zip(packed, some, strict=True):
                joined = np.concatenate([self._held[number] for number in documents])
                row[: len(joined)] = joined
                if len(joined) < self._seq_len:
                    row[len(joined)] |= START
                self.num_filled += self._seq_len - len(joined)
            yield packed
        self._held, self._num_held = [], 0

    def _arrange(self) -> list[list[int]]:
        """Return the documents of each row, with rows and documents in the order of the data."""
        return best_fit([len(words) for words in self._held], self._seq_len)


class OnePerRow(BestFit):
    """Puts each document into a row of its own, for models that cannot keep several apart."""

    def _arrange(self) -> list[list[int]]:
        return [[number] for number in range(len(self._held))]

    def _emptiest(self, rows: Sequence[list[int]]) -> list[int]:
        return []  # more documents fill none


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack items by best-fit decreasing.

    Args:
        lengths: The lengths of the items, each at most `room`.
        room: The capacity of a row.

    Returns:
        The numbers of the items in each row, ascending; rows are ordered by their first item.

    Source: Fewer Truncations Improve Language Modeling (Ding et al., 2024).
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of `with_room`, ascending
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        place = bisect_left(rooms, length)
        if place < len(rooms):
            left = rooms[place]
            row = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[place]
            rows[row].append(number)
        else:
            left, row = room, len(rows)
            rows.append([number])
        left -= length
        if left:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(row)
    for numbers in rows:
        numbers.sort()
    return sorted(rows)
