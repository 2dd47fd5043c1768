"""The doctor's report: a table for people, one JSON object for programs, and an exit code for scripts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli import main
from megatrain.doctor.checks import Check, Level
from megatrain.doctor.examine import Report, check_bench, examine
from megatrain.hardware import load_machine
from tests.doctor.test_bench import TINY, run_bench

FINDINGS = (
    Check(name="swap", level=Level.WARN, text="8.0 GiB on", fix="sudo swapoff -a"),
    Check(name="huge pages", level=Level.OK, text="transparent, madvise"),
)
FAILURE = Check(name="versions", level=Level.FAIL, text="torch 2.0", fix="pip install 'torch>=2.11'")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A stand-in for the examination with one failure, and a cache of the test's own."""
    seen: list[dict[str, Any]] = []

    def fake(path: Path, *, progress: Any, **options: Any) -> Report:
        seen.append({"path": path, **options})
        if not options["bench"]:
            return Report(checks=(*FINDINGS, FAILURE))
        return examine(path, bench=True, sizes=TINY)

    monkeypatch.setattr("megatrain.doctor.examine", fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    return seen


def test_text_has_a_line_per_check_with_its_fix_below() -> None:
    assert Report(checks=(*FINDINGS, FAILURE)).text().splitlines() == [
        " WARN  swap                   8.0 GiB on",
        "                              -> sudo swapoff -a",
        " OK    huge pages             transparent, madvise",
        " FAIL  versions               torch 2.0",
        "                              -> pip install 'torch>=2.11'",
        " 1 OK, 1 WARN, 1 FAIL; with --strict a FAIL exits with 3",
    ]


def test_examination_of_this_machine_with_rates(tmp_path: Path) -> None:
    report = examine(tmp_path, bench=True, sizes=TINY)
    lines = report.text().splitlines()
    assert max(map(len, lines)) <= 110
    shown = report.text()
    for name in ("versions", "device", "host memory", "swap", "lockable memory", "huge pages", "NUMA nodes"):
        assert f"  {name} " in shown, name
    for name in ("threads", "run directory", "drive wear", "/dev/shm", "matrix products", "AdamW by threads"):
        assert f"  {name} " in shown, name
    assert "RATE  drive 0.0625 MiB x 3" in shown
    assert "(no GPU)" in shown, "where the host computes, a copy is one between host buffers, and it is said"
    for check in report.checks:
        assert bool(check.fix) == (check.level is not Level.OK), check
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_object_without_users_hosts_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "alicia"
    home.mkdir()
    for name in ("HOME", "USER", "LOGNAME", "HOSTNAME"):
        monkeypatch.setenv(name, str(home))
    report = examine(home, bench=True, sizes=TINY)
    text = json.dumps(report.json(), allow_nan=False)
    read = json.loads(text)
    assert set(read) == {"versions", "checks", "counts", "bench", "machine"}
    assert set(read["checks"][0]) == {"name", "level", "text", "fix"}
    assert sum(read["counts"].values()) == len(read["checks"])
    assert len(read["bench"]["drive"]["cells"]) == 4
    for private in ("alicia", str(tmp_path), "/tmp/", "/home/"):
        assert private not in text


@pytest.mark.parametrize(("failures", "strict", "code"), [(0, True, 0), (1, False, 0), (1, True, 3)])
def test_only_a_strict_caller_gets_a_failure_s_exit_code(failures: int, strict: bool, code: int) -> None:
    assert Report(checks=(*FINDINGS, *[FAILURE] * failures)).exit_code(strict) == code


def test_command_prints_text_or_json_and_exits(
    found: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("doctor", "--path", str(tmp_path)) == 0
    assert capsys.readouterr().out.endswith("1 OK, 1 WARN, 1 FAIL; with --strict a FAIL exits with 3\n")
    assert run("doctor", "--json", "--strict") == 3
    assert json.loads(capsys.readouterr().out)["counts"] == {"OK": 1, "WARN": 1, "FAIL": 1}
    assert found == [
        {"path": tmp_path, "omp_num_threads": "3", "bench": False, "proves": False},
        {"path": Path("."), "omp_num_threads": "3", "bench": False, "proves": False},
    ]
    assert not (tmp_path / "cache").exists()


def test_bench_writes_a_machine_file_and_keeps_the_rates(
    found: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("doctor", "--path", str(tmp_path), "--out", str(tmp_path / "box.json"), "--json") == 0
    spec = load_machine(tmp_path / "box.json")
    assert json.loads(capsys.readouterr().out)["machine"]["name"] == spec.name
    kept = json.loads((tmp_path / "cache/megatrain/machine.json").read_text())
    assert kept["spec"]["h2d_bytes_per_s"] == spec.h2d_bytes_per_s
    assert found[0]["bench"] is True


def test_directory_that_cannot_be_measured_exits_2(
    found: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("doctor", "--bench", "--path", str(tmp_path / "nothing")) == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_drive_without_direct_io_and_locks_without_gain_are_warned_of(tmp_path: Path) -> None:
    bench = run_bench(torch.device("cpu"), tmp_path, TINY)
    assert bench.drive is not None
    cached = replace(bench, drive=replace(bench.drive, is_direct=False))
    assert [check.name for check in check_bench(cached, on_gpu=False)] == ["direct I/O"]
    assert [check.name for check in check_bench(cached, on_gpu=True)] == ["direct I/O", "locked memory"]
    locked = replace(bench, locked_bytes=4 << 30, lock_limit=16 << 30)
    (check,) = check_bench(locked, on_gpu=True)
    assert check.text.startswith("8 GiB could not be locked at once")
    (check,) = check_bench(replace(locked, locked_bytes=0), on_gpu=True)
    assert check.text.startswith("1 GiB could not be locked at once")
    little = replace(locked, locked_bytes=0, lock_limit=1 << 29)
    assert not any("could not be locked" in check.text for check in check_bench(little, on_gpu=True))
    assert "4 GiB or more could be locked at once" in Report(checks=(), bench=locked).text()
    enough = replace(locked, locked_bytes=16 << 30, copies=replace(bench.copies, h2d_pageable=0.0))
    assert check_bench(enough, on_gpu=True) == []
