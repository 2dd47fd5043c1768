"""Ranks that are stopped, hang or end are named, and the others end. What ranks run here imports little."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ConfigError, RankError
from megatrain.train.records.json_lines import read_rows
from tests.distributed.processes import exit_codes


def fail(ranks: Any, *, rank: int, how: str) -> None:
    """Meet twice, between which a rank fails."""
    ranks.watch.doing("at step 3")
    ranks.meet("norm")
    time.sleep(1)  # each has beaten since
    if ranks.rank == rank:
        if how == "error":
            raise ConfigError("there is no such thing")
        if how == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), signal.Signals[how])
    ranks.meet("norm")


@pytest.mark.parametrize(
    ("size", "rank", "how", "code", "said"),
    [
        (2, 1, "SIGSTOP", -9, "is stopped or lost: it has been silent for "),
        (2, 0, "SIGSTOP", -9, "is stopped or lost: it has been silent for "),
        (2, 1, "hang", 7, "hangs: rank 0 waits for it in the norm of the gradient since "),
        (4, 1, "SIGKILL", -9, "has ended; it was last at step 3"),
        (2, 0, "error", 2, "has ended: there is no such thing"),
    ],
    ids=str,
)
def test_a_rank_that_fails_is_named_once_and_the_others_end(
    tmp_path: Path, size: int, rank: int, how: str, code: int, said: str
) -> None:
    codes = exit_codes(tmp_path / "logs", size, fail, timeout_s=3, rank=rank, how=how)
    assert codes.pop(rank) == code
    assert codes == [RankError.exit_code] * (size - 1)
    text = (tmp_path / "logs/errors").read_text()
    assert text.count(f"rank {rank} (process ") == 1, text
    assert said in text
    assert ("last at step 3" in text) == (how != "error")
    assert ("(parallel.timeout is 3)" in text) == (how in ("SIGSTOP", "hang"))


def test_a_first_rank_at_work_ends_too_and_leaves_its_last_words(tmp_path: Path) -> None:
    codes = exit_codes(tmp_path / "logs", 2, _work, timeout_s=3, words=str(tmp_path / "words"))
    assert codes == [RankError.exit_code, -9]
    said = (tmp_path / "words").read_text()
    assert "rank 1 (process " in said
    assert "was last evaluating step 7. The same command goes on" in said
    assert f"error: {said}" in (tmp_path / "logs/errors").read_text()


def _work(ranks: Any, *, words: str) -> None:
    ranks.watch.doing("evaluating step 7")
    ranks.watch.last_words = Path(words).write_text
    ranks.meet()
    time.sleep(1)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


def test_waiting_for_an_order_is_no_hang(tmp_path: Path) -> None:
    assert exit_codes(tmp_path / "logs", 2, _wait_for_an_order, timeout_s=1) == [0, 0]


def _wait_for_an_order(ranks: Any) -> None:
    if ranks.rank == 0:
        time.sleep(3)
    assert ranks.tell("go" if ranks.rank == 0 else None) == "go"


@pytest.mark.parity
def test_a_run_with_a_stopped_rank_records_it(tmp_path: Path) -> None:
    from tests.distributed.runs import train_run

    place: dict[str, Any] = {"root": str(tmp_path), "out": "run"}
    codes = exit_codes(tmp_path / "logs", 2, train_run, timeout_s=20, killed=[1, 60], how="SIGSTOP", **place)
    assert codes == [RankError.exit_code, -9]
    error = list(read_rows(tmp_path / "run/events.jsonl"))[-1]
    assert (error["event"], error["exit_code"]) == ("error", RankError.exit_code)
    assert "is stopped or lost: it has been silent for 20 s" in error["text"]
