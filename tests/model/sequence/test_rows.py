"""A micro-batch in shards: labels shifted before the cut, positions of whole rows, ends filled up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.model.sequence.rows import cut_rows
from megatrain.model.sequence.shards import Counted
from megatrain.model.shares import count_targets


def _cut(batch: dict[str, Tensor], number: int) -> list[dict[str, Any]]:
    found = []
    for index in range(number):
        shards = Counted(number)
        shards.index = index
        found.append({name: value.tolist() for name, value in cut_rows(batch, shards).items()})
    return found


def test_labels_are_shifted_before_rows_are_cut() -> None:
    ids = torch.tensor([[11, 12, 13, 14, 15, 16]])
    first, second = _cut({"input_ids": ids, "labels": ids}, 2)
    assert first["shift_labels"] == first["labels"] == [[12, 13, 14]]
    assert second["shift_labels"] == second["labels"] == [[15, 16, -100]]
    assert [first["position_ids"], second["position_ids"]] == [[[0, 1, 2]], [[3, 4, 5]]]


def test_every_target_is_in_one_shard() -> None:
    labels = torch.tensor([[-100, -100, 3, 4, -100, 6, 7, 8], [-100, 2, 3, -100, -100, -100, -100, -100]])
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}
    counts = []
    for index in range(4):
        shards = Counted(4)
        shards.index = index
        counts.append(count_targets(cut_rows(batch, shards)))
    assert counts == [3, 1, 2, 1]
    assert sum(counts) == count_targets(batch)


def test_rows_are_filled_up_with_what_trains_nothing() -> None:
    ids = torch.tensor([[11, 12, 13, 14, 15]])
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    batch = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": positions,
        "attention_mask": torch.ones_like(ids),
    }
    last = _cut(batch, 4)[2:]
    assert [part["input_ids"] for part in last] == [[[15, 0]], [[0, 0]]]
    assert [part["position_ids"] for part in last] == [[[1, 2]], [[3, 4]]]  # and no document of its own
    assert [part["attention_mask"] for part in last] == [[[1, 0]], [[0, 0]]]
    assert [part["shift_labels"] for part in last] == [[[-100, -100]], [[-100, -100]]]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"token_type_ids": torch.zeros(1, 4)}, r"token_type_ids of the shape \(1, 4\)"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"attention_mask of the shape \(1, 1, 4, 4\)"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "rows that are padded at their end"),
        ({"position_ids": torch.zeros(3, 1, 4)}, r"position_ids have the shape \(3, 1, 4\)"),
        ({"input_ids": None}, r"has none of \(rows, tokens\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(more: dict[str, Any], sentence: str) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(ConfigError, match=sentence):
        cut_rows({"input_ids": ids, "labels": ids, **more}, Counted(2))
