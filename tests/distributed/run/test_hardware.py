"""A machine at fault, noticed by one of several ranks, ends all; then the run goes on to the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatrain.train.records.json_lines import read_rows
from tests.distributed.processes import exit_codes, run_ranks
from tests.distributed.runs import train_run, train_with_a_flip, train_with_a_jump
from tests.train.test_loop import assert_same_runs


@pytest.mark.parity
def test_ranks_run_a_step_again_together(tmp_path: Path) -> None:
    """One of them computes a replay wrong, in its own micro-batches, and all end."""
    run_ranks(tmp_path / "logs", 2, train_with_a_jump, root=str(tmp_path), out="whole")
    rows = list(read_rows(tmp_path / "whole/metrics.jsonl"))
    assert [row.get("replay") for row in rows] == [None, None, "data", None, None, None]
    assert [row["skipped"] for row in rows] == [False, False, True, False, False, False]
    faulty: dict[str, Any] = {"root": str(tmp_path), "out": "run", "faulty": [1, 5]}
    assert all(exit_codes(tmp_path / "first", 2, train_with_a_jump, **faulty))
    told = (tmp_path / "first/errors").read_text()
    assert "step 3: the loss jumped to" in told
    assert "two more runs of the same step gave different bits" in told
    run_ranks(tmp_path / "second", 2, train_with_a_jump, root=str(tmp_path), out="run")
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parity
def test_a_flip_in_the_share_of_one_rank_ends_all(tmp_path: Path) -> None:
    run_ranks(tmp_path / "logs", 2, train_run, root=str(tmp_path), out="whole")
    flip: dict[str, Any] = {"root": str(tmp_path), "out": "run", "flips": 1}
    assert all(exit_codes(tmp_path / "first", 2, train_with_a_flip, **flip))
    told = (tmp_path / "first/errors").read_text()
    assert re.search(r"a value in RAM has changed by itself: in block \d, plane exp_avg_sq", told)
    assert "after the update of step 5, as was noticed in step 6" in told
    assert not (tmp_path / "run/checkpoints/step-00000006").exists()
    run_ranks(tmp_path / "second", 2, train_run, root=str(tmp_path), out="run")
    assert_same_runs(tmp_path / "run", tmp_path / "whole")
