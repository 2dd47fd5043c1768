"""What a run records and shows: each step once, and the numbers that the words promise."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain import files
from megatrain.errors import OutputError
from megatrain.model.shares import count_targets
from megatrain.train.records.metrics import (
    MetricsLog,
    StepMetrics,
    format_duration,
)

ROW = StepMetrics(
    step=1,
    loss=1.83424,
    grad_norm=0.714,
    lr=9.9e-6,
    tokens=4096,
    targets=4080,
    tokens_per_s=1652.4,
    seconds=2.5,
    host_bytes=3 * 2**29,
    device_bytes=2**28,
    mfu=0.412,
    bound="copies",
    over_bound=1.254,
    fetch_bytes=3000,
    offload_bytes=2000,
    waits={"compute<-fetch slot": 0.5},
    lane_seconds={"compute": 2.0},
)


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_steps(path: Path, steps: range, resume_step: int = 0) -> None:
    with MetricsLog(path, resume_step=resume_step) as log:
        for step in steps:
            log.write(replace(ROW, step=step))


def test_row_has_every_number_and_is_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(ROW)
    assert rows_of(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "loss": 1.83424,
            "grad_norm": 0.714,
            "lr": 9.9e-6,
            "tokens": 4096,
            "tokens_per_s": 1652.4,
            "seconds": 2.5,
            "targets": 4080,
            "skipped": False,
            "host_bytes": 1610612736,
            "device_bytes": 268435456,
            "mfu": 0.412,
            "bound": "copies",
            "over_bound": 1.254,
            "fetch_bytes": 3000,
            "offload_bytes": 2000,
            "allocator_retries": 0,
            "unused_device_bytes": 0,
            "waits": {"compute<-fetch slot": 0.5},
            "lane_seconds": {"compute": 2.0},
        }
    ]
    log.close()


def test_what_the_machine_tells_is_in_the_row(tmp_path: Path) -> None:
    row = replace(ROW, power_w=312.4, throttled=("power cap",), energy_j_per_token=0.2, swap_bytes=0)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(row)
    (written,) = rows_of(tmp_path / "metrics.jsonl")
    assert (written["power_w"], written["throttled"], written["energy_j_per_token"]) == (
        312.4,
        ["power cap"],
        0.2,
    )
    assert written["swap_bytes"] == 0
    assert not {"temperature_c", "ecc_errors", "drive_written_bytes"} & written.keys()


def test_loss_survives_bit_for_bit(tmp_path: Path) -> None:
    loss = float(torch.tensor(1 / 3))
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(replace(ROW, loss=loss))
    assert rows_of(tmp_path / "metrics.jsonl")[0]["loss"] == loss


def test_number_that_json_lacks_is_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(replace(ROW, loss=float("nan"), grad_norm=float("inf"), skipped=True))
    (row,) = rows_of(tmp_path / "metrics.jsonl")
    assert (row["loss"], row["grad_norm"], row["skipped"]) == (None, None, True)


def test_resume_cuts_the_rows_beyond_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 8))
    before = path.read_bytes()
    write_steps(path, range(5, 8), resume_step=4)
    assert path.read_bytes() == before
    write_steps(path, range(8, 9), resume_step=7)
    assert [row["step"] for row in rows_of(path)] == list(range(1, 9))


def test_new_run_begins_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    write_steps(path, range(1, 3))
    assert [row["step"] for row in rows_of(path)] == [1, 2]


def test_torn_last_line_is_cut_wherever_it_tore(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    third = whole.index(b"\n", second) + 1
    for size in range(third, len(whole)):
        path.write_bytes(whole[:size])
        write_steps(path, range(3, 4), resume_step=3)
        assert path.read_bytes() == whole
    path.write_bytes(whole[:third] + b"\0" * 50 + b"\n")
    write_steps(path, range(3, 4), resume_step=3)
    assert path.read_bytes() == whole


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write \S+nothing/metrics\.jsonl: No such file"):
        MetricsLog(tmp_path / "nothing" / "metrics.jsonl")


def test_real_tokens_are_those_with_a_loss() -> None:
    labels = torch.tensor([[5, 6, 7, 8], [-100, 6, -100, 8], [5, -100, -100, -100]])
    # The first position of a row is never predicted: 3 + 2 + 0.
    assert count_targets({"input_ids": labels, "labels": labels}) == 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0m 00s"),
        (61.5, "1m 02s"),
        (7500, "2h 05m"),
        (4 * 86400 + 9 * 3600, "4d 09h"),
        (None, "-"),
        (1e400, "-"),
    ],
)
def test_durations_have_two_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def damage(path: Path, row: int, offset: int, mask: int = 0x80) -> None:
    """Flip bits of one byte of a row, counted from 1."""
    lines = path.read_bytes().splitlines(keepends=True)
    line = bytearray(lines[row - 1])
    line[offset] ^= mask
    path.write_bytes(b"".join([*lines[: row - 1], bytes(line), *lines[row:]]))


def test_damaged_row_is_kept_aside_and_all_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 1003))
    whole = path.read_bytes().splitlines(keepends=True)
    damage(path, 10, 40)
    found = path.read_bytes().splitlines(keepends=True)[9]
    write_steps(path, range(1001, 1003), resume_step=1000)
    assert path.read_bytes().splitlines(keepends=True) == whole[:9] + whole[10:]
    (aside,) = rows_of(tmp_path / "metrics.damaged.jsonl")
    assert aside == {"row": 10, "text": found.decode("latin-1")}
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: damaged in row 10, now kept in {tmp_path / 'metrics.damaged.jsonl'}"
    ]
    caplog.clear()
    write_steps(path, range(1003, 1004), resume_step=1002)
    assert caplog.records == []
    assert len(rows_of(path)) == 1002


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mask", [0x80, 0x01, 0x2A])
def test_no_flipped_byte_costs_another_row(tmp_path: Path, mask: int) -> None:
    """Wherever in a row: in a key, a number, the step or the end of the line."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 31))
    content = path.read_bytes()
    whole = content.splitlines(keepends=True)
    kept_aside = 0
    for offset in range(len(whole[9])):
        path.write_bytes(content)
        (tmp_path / "metrics.damaged.jsonl").unlink(missing_ok=True)
        damage(path, 10, offset, mask)
        write_steps(path, range(0), resume_step=30)
        rows = path.read_bytes().splitlines(keepends=True)
        assert [row for row in rows if row in whole] == whole[:9] + whole[10:], offset
        if len(rows) == 29:
            kept_aside += 1
            assert rows_of(tmp_path / "metrics.damaged.jsonl")[0]["row"] == 10
        else:  # a digit has become another one
            assert not (tmp_path / "metrics.damaged.jsonl").exists()
    assert kept_aside > len(whole[9]) / 4


def test_last_row_that_is_damaged_is_kept_aside_and_one_that_is_torn_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 5))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    write_steps(path, range(0), resume_step=4)
    assert [row["step"] for row in rows_of(path)] == [1, 2, 3]
    assert not (tmp_path / "metrics.damaged.jsonl").exists()
    assert caplog.records == []
    path.write_bytes(whole)
    damage(path, 4, 3)
    write_steps(path, range(0), resume_step=4)
    assert [row["step"] for row in rows_of(path)] == [1, 2, 3]
    assert [row["row"] for row in rows_of(tmp_path / "metrics.damaged.jsonl")] == [4]
    path.write_bytes(whole)
    damage(path, 4, 3)
    write_steps(path, range(0), resume_step=3)  # step 4 is taken again
    assert len(rows_of(tmp_path / "metrics.damaged.jsonl")) == 1


def test_link_or_pipe_in_its_place_is_refused(tmp_path: Path) -> None:
    path, target = tmp_path / "metrics.jsonl", tmp_path / "mine"
    target.write_bytes(b"x" * 900)
    path.symlink_to(target)
    with pytest.raises(
        OutputError, match=r"metrics\.jsonl: it is a symbolic link, and links are not followed"
    ):
        MetricsLog(path)
    assert target.read_bytes() == b"x" * 900
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OutputError, match="not a regular file"):
        MetricsLog(path)


def test_full_disk_leaves_whole_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"

    class Full(files.FileCalls):
        def write(self, descriptor: int, data: memoryview) -> int:
            if len(data) < 200:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            return os.write(descriptor, data[:200])

    with MetricsLog(path) as log:
        log.write(ROW)
        monkeypatch.setattr(files, "system", Full())
        log.write(replace(ROW, step=2))
    assert [row["step"] for row in rows_of(path)] == [1]
    assert f"megatrain cannot write {path}: File too large; free" in caplog.text
