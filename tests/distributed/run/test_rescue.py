"""An error on one of several ranks costs the step that it ends: the one before is saved, if all hold it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatrain.checkpoint.load import find, verify
from megatrain.data.loader import PackedLoader
from megatrain.errors import DataError, RankError
from megatrain.stream.engine import Engine
from megatrain.train import loop, step
from megatrain.train.records.json_lines import read_rows
from tests.distributed.processes import exit_codes, run_ranks
from tests.distributed.runs import train_run
from tests.train.faults.test_rescue import assert_same_ends
from tests.train.test_loop import assert_same_runs

FAILS = "the machine has a bad day"
WHOLE: dict[str, Any] = {"eval": {}, "data": {"val_size": 0}, "checkpoint": {"every": None}}
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "loader": (PackedLoader, "_micro_batch", 4),
    "forward": (torch.nn.functional, "silu", 4),
    "update": (Engine, "_check_step", 4),
    "row": (step, "StepMetrics", 5),
}
"""What is called at some moments of the fifth step, and the step that is whole then."""


def fail_run(
    ranks: Any, *, root: str, out: str, fails: int, moment: str, how: str = "error", **sections: Any
) -> str:
    """Train, and fail on one rank in the fifth step.

    Args:
        ranks: The ranks that train together.
        root: The directory of the model and the text.
        out: The run directory in it.
        fails: The number of the rank that fails.
        moment: One of `MOMENTS`.
        how: `error`; `hang`: the rank waits for ever; `busy`: it fails, and the others wait for ever.
        sections: The settings beside.
    """
    owner, name, _ = MOMENTS[moment]
    function, take, runs = getattr(owner, name), loop.train_step, []

    def stepped(run: Any) -> Any:
        runs.append(run)
        return take(run)

    def failing(*arguments: Any, **given: Any) -> Any:
        if len(runs) == 5:
            if ranks.rank == fails and how != "hang":
                raise DataError(FAILS)
            if ranks.rank == fails or how == "busy":
                threading.Event().wait()
        return function(*arguments, **given)

    with patch.object(loop, "train_step", stepped), patch.object(owner, name, failing):
        return train_run(ranks, root=root, out=out, **{**WHOLE, **sections})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one rank, with all of its checkpoints."""
    root = tmp_path_factory.mktemp("whole")
    every = {**WHOLE, "checkpoint": {"every": 1, "keep_last": None}}
    run_ranks(root / "logs", 1, train_run, root=str(root), out="run", **every)
    return root / "run"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("size", "fails"), [(2, 0), (2, 1), (4, 2)])
def test_error_on_a_rank_costs_one_step(
    tmp_path: Path, whole: Path, size: int, fails: int, moment: str, device: str
) -> None:
    place: dict[str, Any] = {"root": str(whole.parent), "out": tmp_path.name, "train": {"device": device}}
    codes = exit_codes(tmp_path / "first", size, fail_run, fails=fails, moment=moment, **place)
    assert codes == [DataError.exit_code if rank == fails else RankError.exit_code for rank in range(size)]
    said = (tmp_path / "first/errors").read_text()
    run, saved = whole.parent / tmp_path.name, MOMENTS[moment][2]
    checkpoint = run / f"checkpoints/step-{saved:08d}"
    told = f"{FAILS}. Step {saved} is saved in {checkpoint}, and the same command goes on from there"
    assert said.count(told) == 1, said
    assert "Traceback" not in said
    assert find(run / "checkpoints") == [checkpoint]
    assert verify(checkpoint).files == verify(whole / "checkpoints" / checkpoint.name).files
    rows = [row for row in read_rows(run / "events.jsonl") if row["event"] == "error"]
    assert len(rows) == 1
    assert f"Step {saved} is saved in {checkpoint}" in rows[0]["text"]
    run_ranks(tmp_path / "then", 1, train_run, root=str(whole.parent), out=tmp_path.name, **WHOLE)
    assert_same_ends(run, whole, lacks=5 if moment == "row" else None)


@pytest.mark.parametrize(
    ("how", "fails"),
    [("hang", 1), *(pytest.param(*of, marks=pytest.mark.parity) for of in (("busy", 1), ("hang", 0)))],
)
def test_rank_whose_thread_hangs_leaves_the_last_step_all_the_same(
    tmp_path: Path, whole: Path, how: str, fails: int
) -> None:
    """Its watch ends the process, and does before what the run's own thread cannot."""
    place: dict[str, Any] = {"root": str(whole.parent), "out": tmp_path.name}
    task: dict[str, Any] = {"fails": fails, "moment": "forward", "how": how, "timeout_s": 4}
    codes = exit_codes(tmp_path / "first", 2, fail_run, **task, **place)
    assert set(codes) <= {RankError.exit_code, DataError.exit_code}
    run = whole.parent / tmp_path.name
    checkpoint = run / "checkpoints/step-00000004"
    assert find(run / "checkpoints") == [checkpoint]
    assert verify(checkpoint).files == verify(whole / "checkpoints" / checkpoint.name).files
    rows = [row for row in read_rows(run / "events.jsonl") if row["event"] == "error"]
    assert f"Step 4 is saved in {checkpoint}".lower() in rows[0]["text"].lower()
    late = fails if how == "hang" else 0
    assert (
        "silu" in (run / f"stacks-{late}.txt").read_text()
        or "wait" in (run / f"stacks-{late}.txt").read_text()
    )
    run_ranks(tmp_path / "then", 1, train_run, root=str(whole.parent), out=tmp_path.name, **WHOLE)
    assert_same_runs(run, whole)


def test_updates_that_are_not_those_of_a_step_are_not_saved(tmp_path: Path, whole: Path) -> None:
    place: dict[str, Any] = {"root": str(whole.parent), "out": tmp_path.name}
    optim = {"updates": "immediate", "max_grad_norm": None}
    codes = exit_codes(tmp_path / "first", 2, fail_run, fails=1, moment="loader", optim=optim, **place)
    assert codes == [RankError.exit_code, DataError.exit_code]
    assert find(whole.parent / tmp_path.name / "checkpoints") == []
    said = (tmp_path / "first/errors").read_text()
    assert (
        f"{FAILS}. No step is whole on all ranks, so nothing is saved: the same command goes on from" in said
    )
