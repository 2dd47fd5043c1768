"""This module fits examples into rows, whole, cut, in pieces or not at all, and counts them either way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatrain.data.example import Example, TextExample
from megatrain.data.flagged_tokens import IDS, Words, num_trained
from megatrain.data.packing import split_long
from megatrain.data.pairs import Judged
from megatrain.data.read.report import ReadReport
from megatrain.data.tokens.encode import Refused
from megatrain.errors import DataError
from megatrain.objective.rows import kind_of

ALL_MASKED = "no token of it is trained on"
TOO_LONG = "it is longer than data.seq_len (data.too_long=drop)"


class NotTextError(DataError):
    """An example is to be joined with others, but is not plain text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The settings by which examples become rows."""

    seq_len: int
    """The number of tokens of a row."""
    way: str
    """The way of packing: `join`, `best_fit` or `pad`; for judged answers, that of their `RowKind`."""
    too_long: str
    """The treatment of long examples: `split`, `truncate`, `drop`, or `auto`, which splits text alone."""
    fill_id: int
    """The id of the token that fills rows up."""

    @property
    def width(self) -> int:
        """The number of words of a row in the file."""
        return self.seq_len * kind_of(self.way).sequences


@dataclass(kw_only=True, slots=True)
class Counts:
    """The counts of what became of the examples."""

    examples: int = 0
    kept: int = 0
    tokens: int = 0
    """The number of tokens of the documents in the rows; if they are joined, of all documents."""
    trained: int = 0
    """The number of these tokens over which the loss averages."""
    too_long: int = 0
    """The number of examples with more tokens than a row has."""
    cut_tokens: int = 0
    """The number of tokens cut from long examples, and of pieces without a token to train on."""
    cut_off: int = 0
    """The number of examples whose trained tokens all lie behind the end of a row."""
    filled: int = 0
    """The number of tokens of the rows that belong to no document."""
    longest: int = 0
    """The number of tokens of the longest kept example, or answer with its prompt, cut to a row."""
    max_id: int = 0

    def keep(self, pieces: Sequence[Words], num_cut: int) -> None:
        """Count an example of which these pieces are kept."""
        self.kept += 1
        self.longest = max(self.longest, *map(len, pieces))
        self.tokens += sum(map(len, pieces))
        self.trained += sum(map(num_trained, pieces))
        self.cut_tokens += num_cut


def fit(
    example: Example,
    encoded: Words | Judged | Refused,
    packing: Packing,
    counts: Counts,
    report: ReadReport,
) -> list[Any]:
    """Return the parts of an example that go into rows, and count it.

    Args:
        example: The example that was read.
        encoded: The tokens of the example, or the reason for leaving it out.
        packing: The settings by which it becomes rows.
        counts: The counts of all examples, to which this one is added.
        report: The report that notes why an example is left out.

    Returns:
        The words or judged answers; nothing if the example is left out.

    Raises:
        NotTextError: The example is to be joined, and is no plain text.
        DataError: The example is left out, and `data.on_bad_row` is `stop`.
    """
    if isinstance(encoded, Refused):
        report.drop(example.source, encoded.reason)
        return []
    if isinstance(encoded, Judged):
        return _judged(example, encoded, packing, counts, report)
    counts.max_id = max(counts.max_id, int((encoded & IDS).max()))
    if packing.way == "join":
        if not isinstance(example, TextExample):
            raise NotTextError(
                f"{example.source}: data.packing=join is for plain text, and this row is none; use best_fit"
            )
        counts.kept += 1
        counts.tokens += len(encoded)
        counts.trained += len(encoded)
        return [encoded & IDS]
    way = packing.too_long
    if way == "auto":
        way = "split" if isinstance(example, TextExample) else "truncate"
    pieces, num_cut = split_long(encoded, packing.seq_len, way)
    is_long = len(encoded) > packing.seq_len
    counts.too_long += is_long
    if pieces:
        counts.keep(pieces, num_cut)
    elif is_long and way == "drop":
        counts.cut_tokens += num_cut
        report.drop(example.source, TOO_LONG, is_fault=False)
    elif is_long and num_trained(encoded):
        counts.cut_off += 1
        report.drop(example.source, f"{ALL_MASKED} within data.seq_len")
    else:
        report.drop(example.source, ALL_MASKED)
    return pieces


def _judged(
    example: Example, judged: Judged, packing: Packing, counts: Counts, report: ReadReport
) -> list[Judged]:
    """Return an example if each of its answers has tokens to train on, and count it."""
    counts.max_id = max(counts.max_id, judged.max_id)
    sides = judged.sides(packing.seq_len)
    num_tokens, is_long = sum(judged.lengths), max(judged.lengths) > packing.seq_len
    counts.too_long += is_long
    if is_long and packing.too_long == "drop":
        counts.cut_tokens += num_tokens
        report.drop(example.source, TOO_LONG, is_fault=False)
        return []
    if len(sides) > 1 and np.array_equal(sides[0], sides[1]):
        report.drop(example.source, "chosen and rejected are the same within data.seq_len")
        return []
    if not all(map(num_trained, sides)):
        counts.cut_off += is_long
        report.drop(example.source, f"{ALL_MASKED} within data.seq_len" if is_long else ALL_MASKED)
        return []
    counts.keep(sides, num_tokens - sum(map(len, sides)))
    return [judged]
