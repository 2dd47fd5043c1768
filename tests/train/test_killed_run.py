"""kill -9 at random points: the run goes on to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import run_module
from tests.train.test_loop import assert_same_runs


@pytest.mark.parity
@pytest.mark.parametrize(("num_kills", "steps"), [(3, 15), (30, 150)])
def test_killed_run_equals_uninterrupted_run(tmp_path: Path, num_kills: int, steps: int) -> None:
    done = run_module("tests.train.killed_run", tmp_path, str(num_kills), "0", str(steps))
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{num_kills} kills in {steps} steps" in done.stdout
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")
