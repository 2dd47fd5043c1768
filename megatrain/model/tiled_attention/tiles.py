"""Which tiles of scores attention goes through, and what passing them takes: arithmetic on lengths.

A tile is some queries and some keys. Tiles begin where documents begin, so that those of one document do not
depend on what else is in its row; those that the causal order, a window or another document leave out whole
are never made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_TILE = 512
"""The most queries and keys of a tile."""
_LEAST_TILE = 128
"""The most queries and keys of a tile where windows are shorter than that."""
_SCORES = 1 << 24
"""The most scores that are there at once, of all heads together, if a tile of one group of heads has less."""


@dataclass(frozen=True, slots=True)
class View:
    """What the tokens of a document see of each other."""

    num_queries: int
    """The queries: the last tokens of the document."""
    num_keys: int
    is_causal: bool
    """No token sees a later one."""
    window: int | None = None
    """The tokens that a token sees at most, itself among them; None: all before it. There is none without
    the causal order."""

    @property
    def shift(self) -> int:
        """Return the place of the first query among the keys."""
        return self.num_keys - self.num_queries

    @property
    def tile(self) -> int:
        """Return the most queries and keys of a tile: as many as a window has, between two bounds."""
        if self.window is None:
            return _TILE
        return min(_TILE, max(_LEAST_TILE, 1 << (self.window - 1).bit_length()))

    def queries(self) -> Iterator[slice]:
        """Yield the queries of every row of tiles."""
        return _cut(0, self.num_queries, self.tile)

    def keys(self, queries: slice) -> Iterator[slice]:
        """Yield the keys of every tile that some of these queries see a part of."""
        return _cut(*self._reach(queries), self.tile)

    def _reach(self, queries: slice) -> tuple[int, int]:
        first, last = queries.start + self.shift, queries.stop - 1 + self.shift
        begin = 0 if self.window is None else max(0, first - self.window + 1)
        return begin, min(self.num_keys, last + 1) if self.is_causal else self.num_keys

    def is_whole(self, queries: slice, keys: slice) -> bool:
        """Whether every one of these queries sees every one of these keys."""
        first, last = queries.start + self.shift, queries.stop - 1 + self.shift
        is_before = not self.is_causal or keys.stop - 1 <= first
        return is_before and (self.window is None or keys.start > last - self.window)

    @property
    def num_scores(self) -> int:
        """Return the scores of one head in all tiles."""
        rows = ((queries, self._reach(queries)) for queries in self.queries())
        return sum((queries.stop - queries.start) * (end - begin) for queries, (begin, end) in rows)

    @property
    def most_scores(self) -> int:
        """Return the scores of one head in a tile, at most."""
        return min(self.tile, self.num_queries) * min(self.tile, self.num_keys)

    def heads_at_once(self, num_key_heads: int, queries_per_key: int) -> int:
        """Return how many heads of keys pass a tile together; the queries of each have so many heads."""
        return max(1, min(num_key_heads, _SCORES // (queries_per_key * self.most_scores)))


def _cut(begin: int, end: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, end)) for start in range(begin, end, step))


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens of a row that see each other."""

    row: int
    begin: int
    end: int

    @property
    def tokens(self) -> slice:
        """Return its tokens."""
        return slice(self.begin, self.end)


def documents(num_rows: int, num_tokens: int, starts: Sequence[int] | None) -> Iterator[Document]:
    """Yield the documents of rows.

    Args:
        num_rows: The rows.
        num_tokens: The tokens of a row.
        starts: The places where documents begin, over all rows in one, among them where each row does, and
            the end; None: a row is one document.
    """
    if starts is None:
        starts = range(0, num_rows * num_tokens + 1, num_tokens)
    for begin, end in pairwise(starts):
        if begin < end:
            row, place = divmod(begin, num_tokens)
            yield Document(row, place, place + end - begin)
