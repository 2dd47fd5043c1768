"""Rows survive a kill, a torn end goes, and a reader sees whole rows only."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megatrain.errors import OutputError
from megatrain.train.records.events import EventLog
from megatrain.train.records.json_lines import JsonLines, read_rows


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


def test_row_that_cannot_be_written_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain import files

    file = tmp_path / "events.jsonl"
    with EventLog(file, clock=lambda: 1.0) as log:
        log.write("start", 0)
        whole = file.read_bytes()

        def half(descriptor: int, data: memoryview, path: Path) -> None:
            os.write(descriptor, data[:9])
            raise OutputError("full")

        monkeypatch.setattr(files, "write_all", half)
        with pytest.raises(OutputError, match="full"):
            log.write("checkpoint", 3)
        assert file.read_bytes() == whole


def test_reader_passes_over_damage_and_needs_no_file(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    assert list(read_rows(file)) == []
    file.write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n{"a": 2}\n{"a": 3')
    assert list(read_rows(file)) == [{"a": 1}, {"a": 2}]
