"""A step for which the device of one rank has no room: all ranks run it again in smaller rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.load import find, verify
from megatrain.errors import CapacityError
from megatrain.train.records.json_lines import read_rows
from tests.distributed.processes import exit_codes, run_ranks
from tests.distributed.runs import train_run
from tests.train.faults.test_rescue import assert_same_ends
from tests.train.faults.test_smaller_rounds import fill_device
from tests.train.test_loop import assert_same_runs

NO_ROOM = "CUDA out of memory. Tried to allocate 2 GiB."
WHOLE: dict[str, Any] = {
    "train": {"steps": 5, "micro_batch_size": 1, "grad_accumulation": 16},
    "memory": {"lockstep": 4, "activations": "recompute"},
    "data": {"val_size": 0},
    "eval": {},
    "checkpoint": {"every": None},
}
"""Sixteen micro-batches in four runs: two ranks take eight each, in two rounds of one run at first."""


def full_run(ranks: Any, *, full: list[int], most: int, backward: bool = False, **settings: Any) -> list[int]:
    """Train, where the devices of some ranks have no room for more micro-batches together from step 3 on.

    Returns how many were together when this rank's had none, each time.
    """
    with pytest.MonkeyPatch.context() as patch:
        tries = fill_device(patch, most if ranks.rank in full else 99, backward=backward)
        train_run(ranks, **settings)
    return tries


def sections(device: str = "cpu", **memory: Any) -> dict[str, Any]:
    return {
        **WHOLE,
        "train": {**WHOLE["train"], "device": device},
        "memory": {**WHOLE["memory"], **memory},
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank whose device has room."""
    root = tmp_path_factory.mktemp("whole")
    run_ranks(root / "logs", 1, train_run, root=str(root), out="run", **sections())
    return root / "run"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize(
    ("size", "nodes", "full"),
    [(2, 1, [0]), (2, 1, [1]), (2, 1, [0, 1]), (4, 2, [3])],
)
def test_ranks_run_a_step_again_together_to_the_same_bits(
    tmp_path: Path, whole: Path, size: int, nodes: int, full: list[int], device: str, backward: bool
) -> None:
    place: dict[str, Any] = {"root": str(whole.parent), "out": tmp_path.name}
    how: dict[str, Any] = {"num_nodes": nodes, "full": full, "most": 2, "backward": backward}
    found = run_ranks(tmp_path / "logs", size, full_run, **how, **place, **sections(device))
    failed = [rank for rank, tries in enumerate(found) if tries]
    assert failed
    assert set(failed) <= set(full), "the first one tells the others"
    assert all(found[rank] == [4] for rank in failed), "once, and the run keeps to the smaller rounds"
    run = whole.parent / tmp_path.name
    assert_same_runs(run, whole)
    replans = [row for row in read_rows(run / "events.jsonl") if row["event"] == "replan"]
    said = (
        f"the device of rank {failed[0]} had no room for step 3 ({NO_ROOM}), so it runs again, with 2 of its "
        "micro-batches together in place of 4; no bit changes, and the run goes on so"
    )
    assert [(row["step"], row["reason"]) for row in replans] == [(2, said)]
    assert (tmp_path / "logs/errors").read_text().count(said) == 1


def test_bits_are_those_of_smaller_rounds_from_the_start(tmp_path: Path, whole: Path) -> None:
    place: dict[str, Any] = {"root": str(whole.parent), "out": tmp_path.name}
    run_ranks(tmp_path / "logs", 2, train_run, **place, **sections(lockstep=2))
    assert_same_runs(whole.parent / tmp_path.name, whole)


@pytest.mark.parametrize(
    ("lockstep", "most", "tries"),
    [(1, 0, [1]), pytest.param(4, 1, [4, 2], marks=pytest.mark.parity)],
)
def test_ranks_that_find_no_room_then_either_end_together_and_lose_no_other_step(
    tmp_path: Path, whole: Path, lockstep: int, most: int, tries: list[int]
) -> None:
    place: dict[str, Any] = {"root": str(whole.parent), "out": tmp_path.name}
    settings = sections(lockstep=lockstep)
    codes = exit_codes(tmp_path / "first", 2, full_run, full=[1], most=most, **place, **settings)
    assert codes == [CapacityError.exit_code] * 2
    run = whole.parent / tmp_path.name
    checkpoint = run / "checkpoints/step-00000002"
    assert find(run / "checkpoints") == [checkpoint]
    assert verify(checkpoint).files
    said = (tmp_path / "first/errors").read_text()
    assert said.count("device memory ran out in step 3: ") == 1, said
    assert said.count(f"Step 2 is saved in {checkpoint}, and the same command goes on from there") == 1
    assert said.count("so it runs again, with") == len(tries) - 1
    assert "Traceback" not in said
    (row,) = [row for row in read_rows(run / "events.jsonl") if row["event"] == "error"]
    assert f"Step 2 is saved in {checkpoint}" in row["text"]
    run_ranks(tmp_path / "then", 2, train_run, **place, **settings)
    assert_same_ends(run, whole)
