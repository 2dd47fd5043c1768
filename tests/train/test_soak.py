"""Runs on very long rows, of `make soak`: they take minutes, and nothing of them grows."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from tests.forks import run_module
from tests.train.test_loop import assert_same_runs, rows_of

LIMIT_S = 7000


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_row_of_131072_tokens_trains_through_kills_on_drives(tmp_path: Path) -> None:
    """The bits are those of the run that nothing has stopped, with all in RAM, and memory stays as it is."""
    done = run_module("tests.train.killed_run", tmp_path, "2", "1", "4", "soak", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 kills in 4 steps, 0 of them too late" in done.stdout
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")
    inputs_of_layers = 2 * 131_072 * 64 * 4
    assert rows_of(tmp_path / "killed")[-1]["drive_written_bytes"] > 4 * inputs_of_layers
    for out in ("whole", "killed"):
        lines = (tmp_path / f"{out}-rss.txt").read_text().splitlines()
        notes = [list(map(int, line.split())) for line in lines]
        for _, of_process in groupby(notes, key=lambda note: note[0]):
            _, *later = [rss for _, _, rss in of_process]  # the first step loads and allocates what stays
            assert not later or max(later) < 1.05 * later[0]
