"""The load of experts in a run: numbers by hand, of all ranks, and one warning for experts without tokens."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.distributed.alone import ALONE
from megatrain.train.experts import WINDOW, ExpertWatch, load_of
from megatrain.train.loop import train
from megatrain.train.screen.progress import describe_step
from tests.train.project import make_config, write_corpus, write_model_with_experts
from tests.train.records.test_metrics import ROW, rows_of


class Counts:
    """Counts that are given."""

    has_routers = True

    def __init__(self, **counts: list[int]) -> None:
        self.counts = {router: torch.tensor(count) for router, count in counts.items()}

    def take(self) -> dict[str, Tensor]:
        return self.counts


class TwoRanks:
    """This rank, and another one with counts of its own."""

    def __init__(self, rank: int, other: dict[str, list[int]]) -> None:
        self.rank = rank
        self._other = other

    def gather_values(self, mine: Any) -> list[Any]:
        return [mine, self._other]


def watch(counts: Counts, ranks: Any = ALONE) -> ExpertWatch:
    return ExpertWatch(counts, ranks)  # type: ignore[arg-type]


def test_load_by_hand() -> None:
    assert load_of(torch.tensor([6, 0, 3, 1])) == {"busiest": 0.6, "least": 0.0, "unused": 1}
    assert load_of(torch.tensor([5, 5])) == {"busiest": 0.5, "least": 0.5, "unused": 0}
    assert load_of(torch.tensor([0, 0])) == {"busiest": 0.0, "least": 0.0, "unused": 2}


def test_counts_of_ranks_are_added_up() -> None:
    found = watch(Counts(a=[1, 0, 3], b=[2, 2, 0]), TwoRanks(0, {"a": [4, 0, 0], "b": [0, 4, 0]})).take()
    assert found == {
        "a": {"busiest": 0.625, "least": 0.0, "unused": 1},
        "b": {"busiest": 0.75, "least": 0.0, "unused": 1},
    }


def test_a_model_without_experts_asks_no_other_rank() -> None:
    counts = Counts()
    counts.has_routers = False
    assert watch(counts, ranks=None).take() is None


def test_an_expert_without_tokens_is_named_once_after_the_window(caplog: pytest.LogCaptureFixture) -> None:
    counts = Counts(**{"3.mlp.gate": [1, 0, 2, 0], "4.mlp.gate": [0, 1, 1, 1]})
    followed = watch(counts)
    for _ in range(WINDOW - 1):
        followed.take()
    assert not caplog.records
    counts.counts["3.mlp.gate"] = torch.tensor([1, 1, 2, 0])  # the second expert is back in time
    followed.take()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "experts that got no token in 100 steps: 3.mlp.gate 3; 4.mlp.gate 0; each is named once"
    )
    counts.counts["3.mlp.gate"] = torch.tensor([1, 1, 2, 1])
    followed.take()
    counts.counts["3.mlp.gate"] = torch.tensor([1, 1, 2, 0])
    for _ in range(2 * WINDOW):
        followed.take()
    assert len(caplog.records) == 1


def test_of_many_experts_without_tokens_some_are_named(caplog: pytest.LogCaptureFixture) -> None:
    followed = watch(Counts(**{f"{number}.gate": [1] + [0] * 20 for number in range(11)}))
    for _ in range(WINDOW):
        followed.take()
    (record,) = caplog.records
    assert "0.gate 1, 2, 3, 4, 5, 6, 7, 8 and 12 more; 1.gate" in record.getMessage()
    assert "7.gate 1, 2, 3, 4, 5, 6, 7, 8 and 12 more and 3 more; each" in record.getMessage()


def test_only_the_first_rank_warns(caplog: pytest.LogCaptureFixture) -> None:
    followed = watch(Counts(a=[1, 0]), TwoRanks(1, {"a": [1, 0]}))
    for _ in range(WINDOW):
        followed.take()
    assert not caplog.records


def test_a_line_of_the_screen_says_how_uneven_it_is() -> None:
    loads = {
        "0.gate": {"busiest": 0.25, "least": 0.25, "unused": 0},
        "1.gate": {"busiest": 0.625, "least": 0.0, "unused": 3},
    }
    text = describe_step(replace(ROW, experts=loads), eta_s=None)
    assert "busiest expert 62.5%, 3 unused in all layers" in text
    even = describe_step(replace(ROW, experts={"0.gate": loads["0.gate"]}), eta_s=None)
    assert "busiest expert 25.0%  " in even or even.endswith("busiest expert 25.0%")
    assert "expert" not in describe_step(ROW, eta_s=None)


def test_a_run_writes_the_load_of_each_step_and_every_expert_s_tokens(tmp_path: Path) -> None:
    write_model_with_experts(tmp_path / "model")
    write_corpus(tmp_path / "corpus.txt")
    train(make_config(tmp_path, train={"steps": 3}, checkpoint={"every": 2}))
    rows: list[Any] = rows_of(tmp_path / "run/metrics.jsonl")
    for row in rows:
        assert list(row["experts"]) == ["0.mlp.gate", "1.mlp.gate"]
        for load in row["experts"].values():
            assert 0 <= load["least"] <= 0.25 <= load["busiest"] <= 0.5, "two of four for each token"
    written = json.loads((tmp_path / "run/experts.json").read_text())
    assert written["steps"] == 3
    # 2 rows of 32 tokens in 2 micro-batches a step, 2 experts for each
    assert {sum(tokens) for tokens in written["tokens"].values()} == {3 * 2 * 2 * 32 * 2}
