"""Runs on very long rows, and of very many steps: nothing of them grows."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
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


MANY = 100_000
MOST_BYTES_PER_HOUR = 1e6


def notes_of_steps(root: Path, steps: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Take so many steps; return the notes of the second half, with no more files open than before."""
    done = run_module("tests.train.many_steps", root, str(steps), limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    notes = np.loadtxt(root / "notes.txt")
    assert notes[-1, 0] > 0.6 * steps  # on a slow disk few steps have no save under way
    half, quarter = len(notes) // 2, len(notes) // 4
    for name, column in (("descriptors", 2), ("threads", 3)):  # the least: a save that just ends has one more
        assert notes[-quarter:, column].min() <= notes[:half, column].min(), name
    return notes[half:]


def test_descriptors_and_threads_do_not_grow_over_hundreds_of_steps(tmp_path: Path) -> None:
    """With saves behind training, evaluations and texts, and memory that is watched."""
    notes_of_steps(tmp_path, 600)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_memory_does_not_grow_over_100000_steps(tmp_path: Path) -> None:
    """By a line through the resident bytes of the second half; descriptors and threads do not grow either."""
    later = notes_of_steps(tmp_path, MANY)
    per_hour = 3600 * np.polyfit(later[:, 1] - later[0, 1], later[:, 4], 1)[0]
    print(f"{MANY:,} steps: {per_hour / 1e6:+.3f} MB an hour")
    assert per_hour <= MOST_BYTES_PER_HOUR
