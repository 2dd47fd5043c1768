"""A step that hangs ends the process, with its stacks and its last whole step; nothing else does."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.checkpoint.load import verify
from megatrain.errors import HangError
from megatrain.train.hang_watch import LEAST_S, HangWatch
from megatrain.train.loop import train
from megatrain.train.records.json_lines import read_rows
from tests.train.hung_run import config_of
from tests.train.test_loop import assert_same_runs, rows_of, state_of


def run_with(root: Path, what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.train.hung_run", str(root), what]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def last_error(root: Path) -> dict[str, Any]:
    return [dict(row) for row in read_rows(root / "run/events.jsonl") if row["event"] == "error"][-1]


def test_copy_that_hangs_ends_the_run_and_its_last_step_is_saved(tmp_path: Path) -> None:
    done = run_with(tmp_path, "copy")
    assert done.returncode == HangError.exit_code == 8, done.stderr
    assert "never_comes_back" in (tmp_path / "run/stacks.txt").read_text()
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    assert verify(checkpoint).step == 4
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]
    text = last_error(tmp_path)["text"]
    silent = r"step 5 \(\d+ of \d+ passes of layers\) has made no progress for 0m 02s \(train\.hang_after\): "
    assert re.match(silent + "the device, a driver or a drive hangs. ", text), text
    assert f"{tmp_path}/run/stacks.txt says where each thread stands" in text
    assert f"Step 4 is saved in {checkpoint}, and the same command goes on from there" in text
    assert text in done.stderr
    saves = r"step 4 is saved before the run ends: step 5 \(\d+ of \d+ passes of layers\) hangs\n"
    assert re.search(saves, done.stderr)
    train(config_of(tmp_path, "run", hang_after=None))
    train(config_of(tmp_path, "whole", hang_after=None))
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parity
def test_an_evaluation_that_hangs_ends_the_run_and_the_step_before_it_is_saved(tmp_path: Path) -> None:
    done = run_with(tmp_path, "evaluation")
    assert done.returncode == 8, done.stderr
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    text = last_error(tmp_path)["text"]
    assert text.startswith("the evaluation after step 3 has made no progress for 0m 02s (train.hang_after): ")
    assert f"Step 3 is saved in {checkpoint}, and the same command goes on from there" in text
    saves = "step 3 is saved before the run ends: the evaluation after step 3 hangs\n"
    assert saves in done.stderr
    saved = verify(checkpoint).meta
    train(config_of(tmp_path, "run", hang_after=None))
    train(config_of(tmp_path, "whole", hang_after=None, checkpoint={"every": 3, "keep_last": None}))
    assert_same_runs(tmp_path / "run", tmp_path / "whole")
    whole = verify(tmp_path / "whole/checkpoints/step-00000003").meta
    assert saved["rng"] == whole["rng"], "what the evaluation has drawn is in no checkpoint"
    assert saved["data"] == whole["data"]


@pytest.mark.parity
def test_a_row_of_metrics_that_hangs_ends_the_run_and_its_step_is_saved(tmp_path: Path) -> None:
    done = run_with(tmp_path, "row")
    assert done.returncode == 8, done.stderr
    text = last_error(tmp_path)["text"]
    place = tmp_path / "run/metrics.jsonl"
    assert text.startswith(f"the row of step 4 in {place} has made no progress for 0m 02s (train.hang_after)")
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    assert f"Step 4 is saved in {checkpoint}, and the same command goes on from there" in text
    assert verify(checkpoint).step == 4
    train(config_of(tmp_path, "run", hang_after=None))
    train(config_of(tmp_path, "whole", hang_after=None))
    rows = [[row["loss"] for row in rows_of(tmp_path / out) if row["step"] != 4] for out in ("run", "whole")]
    assert rows[0] == rows[1]
    left, right = state_of(tmp_path / "run"), state_of(tmp_path / "whole")
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())
    assert len(rows[0]) == 6, "its own row alone is lost"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", ["write", "last", "blocking", "error"])
def test_a_save_that_hangs_ends_the_run_and_the_newest_checkpoint_is_named(what: str, tmp_path: Path) -> None:
    done = run_with(tmp_path, what)
    assert done.returncode == 8, done.stderr
    text = last_error(tmp_path)["text"]
    step = {"write": 4, "last": 7, "blocking": 4, "error": 4}[what]
    after = " after an error (a wire is loose)" if what == "error" else ""
    newest = tmp_path / f"run/checkpoints/step-{step - 1 if what == 'last' else step - 2:08d}"
    assert text.startswith(
        f"the save of step {step}{after} has made no progress for 0m 02s (train.hang_after)"
    )
    why = "The last step could not be saved, since that makes no progress either"
    assert f"{why}: the same command goes on from {newest}" in text
    assert verify(newest).step == int(newest.name[-8:])
    assert "never_comes_back" in (tmp_path / "run/stacks.txt").read_text()


@pytest.mark.parity
def test_a_second_ctrl_c_ends_a_run_whose_save_hangs_with_nothing_half_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.train.hung_run", str(tmp_path), "ctrl_c"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "hangs\n"
        process.send_signal(signal.SIGINT)
        while "is asked to stop" not in process.stderr.readline():  # two signals at once are one
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "ended at once: what is not saved is lost" in said
    found = [path for path in (tmp_path / "run/checkpoints").iterdir() if not path.name.startswith(".tmp-")]
    assert [verify(path).step for path in found] == [2]
    train(config_of(tmp_path, "run", hang_after=None))
    train(config_of(tmp_path, "whole", hang_after=None))
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parity
@pytest.mark.parametrize("what", ["update", "immediate", "resident"])
def test_state_that_may_be_torn_is_not_saved_and_the_newest_checkpoint_is_named(
    what: str, tmp_path: Path
) -> None:
    done = run_with(tmp_path, what)
    assert done.returncode == 8, done.stderr
    newest = {"update": 2, "immediate": 4, "resident": 3}[what]
    found = sorted((tmp_path / "run/checkpoints").iterdir())
    assert found[-1].name == f"step-{newest:08d}"
    why = {
        "update": "An update hangs in the middle, so nothing is saved",
        "immediate": "With optim.updates=immediate nothing is saved",
        "resident": "Its state is newer on the device than in RAM, so nothing is saved",
    }[what]
    assert f"{why}: the same command goes on from {found[-1]}" in last_error(tmp_path)["text"]


@pytest.mark.parity
def test_what_takes_long_is_no_hang(tmp_path: Path) -> None:
    """Callbacks, data, an evaluation, saves, and a process that is stopped, for longer than `hang_after`."""
    done = run_with(tmp_path, "slow")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run/stacks.txt").exists()


def test_limits_follow_the_steps() -> None:
    watch = HangWatch("auto", lambda: 0, lambda silent_s, what: None)
    assert watch.limit_s is None
    for seconds in (1000.0, 10.0, 12.0):
        watch.took(seconds)
    assert watch.limit_s == LEAST_S == 1800
    for _ in range(3):
        watch.took(1000.0)
    assert watch.limit_s == 20 * 1000.0
    watch = HangWatch(7.0, lambda: 0, lambda silent_s, what: None)
    assert watch.limit_s is None
    watch.took(1.0)
    assert watch.limit_s == 7.0


def test_only_time_without_progress_of_a_watched_step_counts() -> None:
    progress, found, now = [0], list[float](), [0.0]
    watch = HangWatch(10.0, lambda: progress[0], lambda silent_s, what: found.append(silent_s))
    watch.clock.now = lambda: now[0]  # type: ignore[method-assign]

    def later(seconds: float) -> list[float]:
        now[0] += seconds
        watch.look()
        return found

    with watch.watched():
        assert later(1) == later(100) == []  # the first step
    watch.took(1.0)
    assert later(100) == []
    with watch.watched():
        assert later(1) == later(9.5) == []
        progress[0] += 1
        assert later(9.5) == later(9.5) == []
    with watch.watched():
        assert later(9) == []
        assert later(10) == [10.0]


def test_what_is_watched_inside_of_something_takes_its_place_meanwhile() -> None:
    found, now = list[tuple[float, str]](), [0.0]
    watch = HangWatch(10.0, lambda: 0, lambda silent_s, what: found.append((silent_s, what)))
    watch.clock.now = lambda: now[0]  # type: ignore[method-assign]
    watch.took(1.0)

    def later(seconds: float) -> list[tuple[float, str]]:
        now[0] += seconds
        watch.look()
        return found

    with watch.watched("the save of step 3"):
        assert later(1) == later(9) == []
        with watch.watched("step 3"):
            assert later(9) == []
            assert later(10) == [(10.0, "step 3")]
        assert later(9) == [(10.0, "step 3")]
        assert later(10)[1:] == [(10.0, "the save of step 3")]


@pytest.mark.parametrize("moves", [False, True])
def test_a_thread_that_reads_and_writes_moves_where_that_counts(moves: bool) -> None:
    found, now = list[float](), [0.0]
    watch = HangWatch(10.0, lambda: 0, lambda silent_s, what: found.append(silent_s))
    watch.clock.now = lambda: now[0]  # type: ignore[method-assign]
    watch.took(1.0)
    with watch.watched("the save of step 3", moves=moves):
        for _ in range(3):
            sum(range(100_000))  # some of this thread's CPU time
            now[0] += 9
            watch.look()
    assert found == ([] if moves else [18.0])
