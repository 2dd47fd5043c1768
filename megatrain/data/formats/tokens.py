"""Rows that are tokenised already."""

from __future__ import annotations

from typing import Any

from megatrain.data.example import Source, TokensExample
from megatrain.data.formats.fields import Fields
from megatrain.data.row import RowError

_IGNORED = -100
_MASKS = ("completion_mask", "assistant_masks")
"""TRL's columns that say which tokens are trained on."""


def tokens(fields: Fields, place: Source) -> list[TokensExample]:
    """Read token ids, and which are trained on: `labels`, or a mask of 1 and 0."""
    ids = _numbers(fields, "input_ids")
    if not ids:
        raise RowError("no tokens", f'column "{fields.column("input_ids")}" is empty', is_fault=False)
    if min(ids) < 0:
        raise RowError("a negative token id")
    labels = _numbers(fields, "labels") if fields.get("labels") is not None else None
    for name in _MASKS:
        if labels is None and fields.get(name) is not None:
            mask = _numbers(fields, name)
            _check_length(mask, ids, name)
            labels = tuple(token if kept else _IGNORED for token, kept in zip(ids, mask, strict=True))
    if labels is not None:
        _check_length(labels, ids, fields.column("labels"))
    if fields.get("attention_mask") is not None:
        attended = _numbers(fields, "attention_mask")
        _check_length(attended, ids, "attention_mask")
        if not all(attended):
            fields.repairs.append("padding left out")
            ids = tuple(token for token, seen in zip(ids, attended, strict=True) if seen)
            labels = labels and tuple(label for label, seen in zip(labels, attended, strict=True) if seen)
    return [TokensExample(source=place, input_ids=ids, labels=labels)]


def _check_length(values: tuple[int, ...], ids: tuple[int, ...], name: str) -> None:
    if len(values) != len(ids):
        raise RowError(
            f"{name} of another length than input_ids", f"{len(values)} {name} for {len(ids)} tokens"
        )


def _numbers(fields: Fields, field: str) -> tuple[int, ...]:
    what = f'column "{fields.column(field)}"'
    value: Any = fields.get(field)
    if value is None:
        raise fields.missing(field)
    values = fields.as_list(value, what)
    if not all(isinstance(number, int) for number in values):
        raise RowError(f"{what} is not whole numbers")
    return tuple(map(int, values))
