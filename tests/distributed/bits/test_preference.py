"""Runs that learn from judged answers on several ranks: the bits of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatrain.train.loop import train
from tests.distributed.processes import run_ranks
from tests.searches import searched_for_a_moment
from tests.train.evaluate.test_evaluation import events_of
from tests.train.preference.test_runs import config_of, write_model, write_rows
from tests.train.test_loop import assert_same_runs, rows_of

LOSSES = ["dpo", "kto", "orpo"]


def train_judged(ranks: Any, *, root: str, losses: Sequence[str]) -> None:
    """Train with each loss in turn."""
    size = 1 if ranks is None else ranks.size
    for loss in losses:
        config = config_of(
            Path(root),
            f"{loss}-{size}",
            loss,
            parallel={"shards": 4},
            data={"cache": f"{root}/cache-{size}"},
            train={"grad_accumulation": 4, "micro_batch_size": 2},
        )
        with searched_for_a_moment():
            train(config, ranks=ranks)


@pytest.mark.parametrize(
    ("size", "losses"),
    [(2, ["kto"]), *(pytest.param(size, LOSSES, marks=pytest.mark.parity) for size in (2, 4))],
)
def test_judged_answers_are_learnt_to_the_bits_of_one_rank(
    tmp_path: Path, size: int, losses: list[str]
) -> None:
    write_model(tmp_path)
    for rows in ("dpo", "kto"):
        write_rows(tmp_path / f"{rows}.jsonl", 20, is_kto=rows == "kto")
    run_ranks(tmp_path / "one", 1, train_judged, root=str(tmp_path), losses=losses)
    run_ranks(tmp_path / "several", size, train_judged, root=str(tmp_path), losses=losses)
    for loss in losses:
        alone, shared = tmp_path / f"{loss}-1", tmp_path / f"{loss}-{size}"
        assert_same_runs(shared, alone)
        names = ["rewards/chosen", "rewards/rejected", "rewards/margins", *(["kl"] * (loss == "kto"))]
        for name in names:
            assert [row[name] for row in rows_of(shared)] == [row[name] for row in rows_of(alone)]
        evaluations = [
            [(one["step"], one["loss"]) for one in events_of(run, "evaluation")] for run in (shared, alone)
        ]
        assert evaluations[0] == evaluations[1]
        assert len(evaluations[0]) >= 2
