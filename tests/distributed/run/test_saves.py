"""Several ranks save behind training: the first one writes, and all wait before they change what it needs."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megatrain import files
from megatrain.checkpoint import format
from megatrain.checkpoint.load import find
from megatrain.checkpoint.uncopied import Uncopied
from megatrain.errors import RankError
from megatrain.layout.ownership import CUT_NUMEL
from megatrain.train import loop
from megatrain.train.records.json_lines import read_rows
from tests.distributed.cases import cut_at
from tests.distributed.crew import Crew
from tests.distributed.runs import train_run
from tests.train.saves.test_saves import contents
from tests.train.test_loop import assert_same_runs

EVERY: dict[str, Any] = {"every": 2, "keep_last": None}
EMULATED = {"device": "emulated"}


class Slow(files.FileCalls):
    """A disk that may write nothing before step 3 has ended, and that is full for a while."""

    def __init__(self) -> None:
        self.writes, self.is_full = threading.Event(), False

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        assert self.writes.wait(60)
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write_at(descriptor, data, offset)

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.is_full and "block-00001" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data)


def save_run(
    ranks: Any,
    *,
    root: str,
    out: str,
    background: bool = True,
    waits: bool = True,
    holds: bool = True,
    full: int = 0,
    full_on: int | None = None,
    counts: files.FileCalls | None = None,
    cut: int = CUT_NUMEL,
    **sections: Any,
) -> list[list[str]]:
    """Train with small chunks and a slow disk; return the checkpoints that are whole after each step.

    Args:
        ranks: The ranks that train together.
        root: The directory of the model and the text.
        out: The run directory in it.
        background: `checkpoint.background`.
        waits: Whether the other ranks wait for what is not copied yet.
        holds: Whether the disk writes nothing before step 3 has ended.
        full: The step at whose end the disk has no room, until the next one ends; 0: none. A save that the
            run waits for has room for the state of its first block.
        full_on: The rank whose disk that is; None: that of all.
        counts: The system whose calls are used, in the place of this disk; None: this disk's.
        cut: The elements between the places where state may be cut among ranks.
        sections: The settings beside.
    """
    disk, seen = Slow(), list[list[str]]()
    if not holds:
        disk.writes.set()
    take = loop.train_step

    def stepped(run: Any) -> Any:
        row = take(run)
        seen.append([path.name for path in find(Path(root, out, "checkpoints"))])
        disk.is_full = run.step == full and full_on in (None, run.ranks.rank)
        if run.step == 3:
            disk.writes.set()
        return row

    checkpoint = {**EVERY, "background": background, "buffer": 2**26}
    with (
        cut_at(cut),
        patch.object(format, "CHUNK_BYTES", 4096),
        patch.object(files, "system", counts or disk),
        patch.object(loop, "train_step", stepped),
        patch.object(Uncopied, "wait", Uncopied.wait if waits else lambda *_: None),
    ):
        train_run(ranks, root=root, out=out, checkpoint=checkpoint, **sections)
    return seen


KINDS: dict[str, dict[str, Any]] = {
    "host": {},
    "serial": {"optim": {"updates": "serial"}},
    "int8": {"optim": {"state": "int8"}},
    "emulated": {"train": EMULATED},
    "resident": {"train": EMULATED, "memory": {"resident_blocks": 2}},
    "alone": {"train": EMULATED, "memory": {"resident_blocks": 2, "mirror_resident": False}},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_checkpoints_of_ranks_are_those_of_blocking_saves(
    tmp_path: Path, standing: Callable[[int], Crew], size: int, kind: str
) -> None:
    place: dict[str, Any] = {"root": str(tmp_path), **KINDS[kind]}
    standing(size).run(save_run, out="plain", background=False, **place)
    told = standing(size).run(save_run, out="own", **place)
    found = contents(tmp_path / "own")
    assert len(found) > 15
    assert found == contents(tmp_path / "plain")
    assert told[0][2] == [], "nothing of step 2 was whole when step 3 ended, and the run went on"
    assert_same_runs(tmp_path / "own", tmp_path / "plain")


def test_state_on_drives_is_read_before_any_rank_goes_on(
    tmp_path: Path, standing: Callable[[int], Crew]
) -> None:
    found = []
    for out, background in (("plain", False), ("own", True)):
        drive = tmp_path / f"{out}-drive"
        tiers = {"ram": 800_000, "nvme": [str(drive)]}
        given = {"memory": {"activations": "recompute", "fragments": False, "tiers": tiers}}
        place = {"root": str(tmp_path), "out": out, "background": background, "holds": False}
        standing(2).run(save_run, **place, **given)
        found.append(contents(tmp_path / out))
    assert len(found[0]) > 15
    assert found[0] == found[1]


def test_without_the_wait_of_other_ranks_a_checkpoint_would_be_torn(
    tmp_path: Path, standing: Callable[[int], Crew]
) -> None:
    place: dict[str, Any] = {"root": str(tmp_path)}
    standing(2).run(save_run, out="plain", background=False, **place)
    standing(2).run(save_run, out="own", waits=False, **place)
    assert contents(tmp_path / "own") != contents(tmp_path / "plain")


@pytest.mark.parametrize("kind", ["host", pytest.param("alone", marks=pytest.mark.parity)])
def test_ranks_go_on_after_a_save_that_found_no_room(
    tmp_path: Path, standing: Callable[[int], Crew], kind: str
) -> None:
    whole: dict[str, Any] = {"eval": {}, "data": {"val_size": 0}}
    place: dict[str, Any] = {"root": str(tmp_path), **whole, **KINDS[kind]}
    standing(2).run(save_run, out="plain", **place)
    standing(2).run(save_run, out="own", holds=False, full=4, **place)
    assert_same_runs(tmp_path / "own", tmp_path / "plain")
    assert_unsaved(tmp_path / "own", step=4)


def assert_unsaved(run: Path, step: int) -> None:
    """Check that the run has gone on after the save of a step found no room, and has saved the others."""
    saved = [path.name for path in find(run / "checkpoints")]
    assert saved == [format.directory_name(each) for each in (6, 4, 2) if each != step]
    rows = [row for row in read_rows(run / "events.jsonl") if row["event"] == "unsaved"]
    assert [row["step"] for row in rows] == [step]
    assert "No space left on device" in rows[0]["reason"]


def test_a_wait_ends_when_the_process_that_copies_is_gone() -> None:
    asked = []

    def look() -> None:
        asked.append(uncopied.wanted())
        raise RankError("rank 0 has ended")

    uncopied = Uncopied(np.zeros(5, np.int64), 3, 1, look)
    uncopied.hold([0, 2])
    uncopied.wait(1)
    with pytest.raises(RankError):
        uncopied.wait(2)
    assert asked == [[2]]
    assert uncopied.wanted() == []
    uncopied.let_go(2)
    uncopied.wait(2)
    with pytest.raises(RankError):
        uncopied.wait(0)
    uncopied.let_all_go()
    uncopied.wait(0)
