"""kill -9 at random points: the run goes on to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import run_module
from tests.train.test_loop import assert_same_runs


@pytest.mark.parametrize(
    ("where", "num_kills", "steps"),
    [
        ("device", 3, 15),
        pytest.param("ram", 3, 15, marks=pytest.mark.parity),
        pytest.param("ram", 30, 150, marks=pytest.mark.parity),
        pytest.param("device", 30, 150, marks=pytest.mark.parity),
    ],
)
def test_killed_run_equals_uninterrupted_run(tmp_path: Path, where: str, num_kills: int, steps: int) -> None:
    done = run_module("tests.train.killed_run", tmp_path, str(num_kills), "0", str(steps), where)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{num_kills} kills in {steps} steps" in done.stdout
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("adapters", 2),
        pytest.param("adapters", 200, marks=[pytest.mark.parity, pytest.mark.timeout(3600)]),
        pytest.param("model", 200, marks=[pytest.mark.parity, pytest.mark.timeout(3600)]),
    ],
)
def test_run_killed_at_a_call_decides_and_ends_as_if_nothing_had_been(
    tmp_path: Path, kind: str, number: int
) -> None:
    done = run_module("tests.train.killed_calls", tmp_path, str(number), "1", kind)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{number} of" in done.stdout
