"""Rows survive a kill, a torn end goes, and a reader sees whole rows only."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatrain import files
from megatrain.errors import OutputError
from megatrain.train import loop
from megatrain.train.loop import train
from megatrain.train.records.events import EventLog
from megatrain.train.records.json_lines import JsonLines, read_rows
from tests.train.project import make_config
from tests.train.test_loop import rows_of, state_of


def test_torn_last_row_is_cut_and_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    log = EventLog(file, clock=lambda: 7.0)
    log.write("start", 0, steps=9)
    log.write("checkpoint", 4)  # never closed: what a kill leaves
    with open(file, "ab") as torn:
        torn.write(b'{"event": "checkpoint", "time": 8.0, "st')
    assert [row["event"] for row in read_rows(file)] == ["start", "checkpoint"]
    with EventLog(file, clock=lambda: 9.5) as again:
        again.write("resume", 4)
    assert list(read_rows(file)) == [
        {"event": "start", "time": 7.0, "step": 0, "steps": 9},
        {"event": "checkpoint", "time": 7.0, "step": 4},
        {"event": "resume", "time": 9.5, "step": 4},
    ]


def test_rows_are_private_and_no_link_is_followed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with JsonLines(tmp_path / "a.jsonl") as log:
            log.append({"loss": float("nan"), "lr": float("inf"), "step": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.jsonl").stat().st_mode) == 0o600
    assert (tmp_path / "a.jsonl").read_text() == '{"loss": null, "lr": null, "step": 1}\n'
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    with pytest.raises(OutputError, match=r"b\.jsonl"):
        JsonLines(tmp_path / "b.jsonl")


class Stuck(files.FileCalls):
    """A file system that takes 9 bytes of a row while it is full, and perhaps cannot cut them off again."""

    def __init__(self, *, cuts: bool = True) -> None:
        self.is_full, self.cuts = True, cuts

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.is_full and bytes(data[:1]) != b"{":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data[:9] if self.is_full else data)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        if self.is_full and not self.cuts:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().truncate(descriptor, num_bytes)


@pytest.mark.parametrize("cuts", [True, False])
def test_rows_that_cannot_be_written_leave_no_part_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cuts: bool
) -> None:
    file, system = tmp_path / "events.jsonl", Stuck(cuts=cuts)
    heard: list[Mapping[str, Any]] = []
    with EventLog(file, clock=lambda: 1.0, listen=heard.append) as log:
        log.write("start", 0)
        whole = file.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(files, "system", system)
            log.write("checkpoint", 3)
            log.write("checkpoint", 4)
            assert file.read_bytes() == whole + (b"" if cuts else b'{"event":')
            system.is_full = False
            log.write("checkpoint", 5)
    assert [row["step"] for row in heard] == [0, 3, 4, 5], "listeners hear of all"
    assert [row["step"] for row in read_rows(file)] == [0, 5]
    assert b"}\n{" in file.read_bytes(), "no part of a row is left between them"
    first, last = caplog.messages
    assert first == (
        f"megatrain cannot write {file}: No space left on device; free some space there, or write to another "
        "directory. The run goes on without the rows that cannot be written"
    )
    assert last == f"2 rows of {file} could not be written"


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
def test_file_that_goes_is_written_anew_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    file = tmp_path / "metrics.jsonl"
    with JsonLines(file) as log:
        log.append({"step": 1})
        if how == "removed":
            file.unlink()
        elif how == "renamed":
            file.rename(tmp_path / "old.jsonl")
        else:
            (tmp_path / "new").write_text('{"step": 0}\n')
            (tmp_path / "new").rename(file)
        log.append({"step": 2})
        log.append({"step": 3})
    assert [row["step"] for row in read_rows(file)] == [0] * (how == "replaced") + [2, 3]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 or how == "replaced"
    assert caplog.messages == [f"{file} was removed or replaced: its rows go on in a file of that name"]


def test_file_of_a_directory_that_moves_goes_along_and_of_one_that_goes_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    with JsonLines(tmp_path / "run/a.jsonl") as log:
        (tmp_path / "run").rename(tmp_path / "moved")
        log.append({"step": 1})
        assert [row["step"] for row in read_rows(tmp_path / "moved/a.jsonl")] == [1]
        assert not caplog.messages
        shutil.rmtree(tmp_path / "moved")
        log.append({"step": 2})
        log.append({"step": 3})
        assert log.num_missed == 2
    assert len(caplog.messages) == 2


def test_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine\n")
    with JsonLines(tmp_path / "a.jsonl") as log:
        (tmp_path / "a.jsonl").unlink()
        (tmp_path / "a.jsonl").symlink_to(other)
        log.append({"step": 1})
        assert log.num_missed == 1
    assert other.read_text() == "mine\n"


def test_run_goes_on_without_the_rows_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(
        make_config(tmp_path, "whole", train={"steps": 6}, checkpoint={"every": None}, log={"report": False})
    )
    step_of, system = loop.train_step, Stuck()

    def stepped(run: Any) -> Any:
        system.is_full = run.step in (2, 3)
        return step_of(run)

    monkeypatch.setattr(loop, "train_step", stepped)
    monkeypatch.setattr(files, "system", system)
    system.is_full = False
    train(make_config(tmp_path, train={"steps": 6}, checkpoint={"every": None}, log={"report": False}))
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert [row["step"] for row in rows_of(run)] == [1, 2, 5, 6]
    assert [row["loss"] for row in rows_of(run)] == [rows_of(whole)[at]["loss"] for at in (0, 1, 4, 5)]
    left, right = state_of(run), state_of(whole)
    assert all(left[name].equal(right[name]) for name in right)
    assert f"2 rows of {run}/metrics.jsonl could not be written" in caplog.messages


def test_reader_passes_over_damage_and_needs_no_file(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    assert list(read_rows(file)) == []
    file.write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n{"a": 2}\n{"a": 3')
    assert list(read_rows(file)) == [{"a": 1}, {"a": 2}]
