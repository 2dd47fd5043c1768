"""Reader of rows that are tokenised already."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from megatrain.data.example import Source, TokensExample
from megatrain.data.formats.fields import Fields
from megatrain.data.row import RowError

_IGNORED = -100
_MASKS = ("completion_mask", "assistant_masks")
"""TRL's columns that say which tokens are trained on."""


def tokens(fields: Fields, place: Source) -> list[TokensExample]:
    """Read token ids, and the trained ones among them by `labels` and by all masks of 1 and 0 that are there.

    A row of several packed documents becomes that many examples, so that no document sees another.
    """
    ids = _numbers(fields, "input_ids")
    if not ids:
        raise RowError(
            "there are no tokens", f'column "{fields.column("input_ids")}" is empty', is_fault=False
        )
    if min(ids) < 0:
        raise RowError("a token id is negative")
    labels = _optional(fields, "labels", len(ids))
    for mask in (_optional(fields, name, len(ids)) for name in _MASKS):
        if mask is not None:
            given = ids if labels is None else labels
            labels = tuple(label if kept else _IGNORED for label, kept in zip(given, mask, strict=True))
    positions = _optional(fields, "position_ids", len(ids))
    attended = _optional(fields, "attention_mask", len(ids))
    if attended is not None and not all(attended):
        fields.repairs.append("padding was left out")
        seen = [place for place, number in enumerate(attended) if number]
        ids, attended = tuple(ids[place] for place in seen), tuple(attended[place] for place in seen)
        labels = labels and tuple(labels[place] for place in seen)
        positions = positions and tuple(positions[place] for place in seen)
    if not ids:
        raise RowError("there are no tokens", "attention_mask leaves no token", is_fault=False)
    starts = _starts(fields, len(ids), positions, attended)
    if len(starts) > 1:
        fields.repairs.append("documents that share a row were taken apart")
    return [
        TokensExample(source=place, input_ids=ids[start:end], labels=labels and labels[start:end])
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)
    ]


def _starts(
    fields: Fields, count: int, positions: tuple[int, ...] | None, attended: tuple[int, ...] | None
) -> list[int]:
    """Return the positions at which the documents of a row begin, by all columns that tell.

    Raises:
        RowError: The columns do not tell, or contradict each other.
    """
    found: dict[str, list[int]] = {}
    if positions is not None:
        found["position_ids"] = [place for place, position in enumerate(positions) if position == 0]
        starts = np.zeros(count, dtype=np.int64)
        starts[found["position_ids"]] = found["position_ids"]
        if positions != tuple(np.arange(count) - np.maximum.accumulate(starts)) or positions[0] != 0:
            raise RowError("position_ids do not count from 0 in each document")
    if fields.get("seq_lengths") is not None:
        lengths = _numbers(fields, "seq_lengths")
        if sum(lengths) != count or min(lengths, default=0) < 1:
            raise RowError(
                "seq_lengths are not those of the tokens",
                f"seq_lengths add up to {sum(lengths):,}, and there are {count:,} tokens",
            )
        found["seq_lengths"] = [*accumulate(lengths[:-1], initial=0)]
    if attended is not None and set(attended) != {1}:  # the mask numbers the documents
        found["attention_mask"] = [
            place for place in range(count) if not place or attended[place] != attended[place - 1]
        ]
    (name, starts_of), *others = [*found.items()] or [("input_ids", [0])]
    for other, starts_of_other in others:
        if starts_of_other != starts_of:
            raise RowError(f"{other} and {name} tell of different documents")
    return starts_of


def _optional(fields: Fields, name: str, count: int) -> tuple[int, ...] | None:
    if fields.get(name) is None:
        return None
    values = _numbers(fields, name)
    _check_length(values, count, fields.column(name))
    return values


def _check_length(values: tuple[int, ...], count: int, name: str) -> None:
    if len(values) != count:
        raise RowError(
            f"{name} has another length than input_ids", f"there are {len(values)} {name} for {count} tokens"
        )


def _numbers(fields: Fields, field: str) -> tuple[int, ...]:
    what = fields.name_of(field)
    value: Any = fields.get(field)
    if value is None:
        raise fields.missing(field)
    values = fields.as_list(value, what)
    if not all(isinstance(number, int) for number in values):
        raise RowError(f"{what} is not whole numbers")
    return tuple(map(int, values))
