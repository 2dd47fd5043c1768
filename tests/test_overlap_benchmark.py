"""`benchmarks/overlap/emulated.py` says what it promises; times are never asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overlap import emulated
from tests.clocks import OwnClocks

KEYS = (
    "step_over_bound",
    "speedup_over_megatrain_schedule",
    "speedup_over_zero3_schedule",
    "optimizer_hidden",
    "depth_spread",
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the script; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["emulated", *arguments])
    return emulated.main()


def write_machines(path: Path) -> Path:
    """Write a file of machines of round rates under the names that the benchmark knows."""
    names = ("rtx4090-pcie4", "h100-pcie5", "gh200-c2c")
    rates = {
        "compute_flops_per_s": 6e14,
        "h2d_bytes_per_s": 5e10,
        "d2h_bytes_per_s": 5e10,
        "host_bytes_per_s": 3e11,
        "device_bytes": 8e10,
    }
    path.write_text(json.dumps({"_note": "for a test"} | dict.fromkeys(names, rates)))
    return path


@pytest.mark.parity  # its lanes are threads: on a busy computer its figures are not sure
def test_a_quick_run_reports_physical_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the lanes' own timetable: nothing sleeps, so that no computer is too slow for it."""
    OwnClocks(monkeypatch)
    machines = write_machines(tmp_path / "machines.json")
    asked = ("--quick", "--seconds", "0.25", "--machines", str(machines), "--out", str(tmp_path / "out"))
    assert run(monkeypatch, *asked) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "out").read_text()) == result
    assert all(isinstance(result[key], float) for key in KEYS)
    assert {"hardware", "machines", "assumptions", "claims", "published"} <= result.keys()
    assert result["machines"]["h100-pcie5"]["h2d_bytes_per_s"] == 5e10

    assert result["speedup_over_megatrain_schedule"] > 1
    assert result["speedup_over_zero3_schedule"] > 1
    assert 0 <= result["optimizer_hidden"] <= 1
    params = result["assumptions"]["block_params"]
    for row in result["rows"]:
        assert row["step_over_bound"] > 1
        assert 0 < row["device_idle"] < 1
        if row["schedule"] in ("deferred", "immediate"):
            assert row["program_bytes"] == {
                "fetch": 2 * params * (2 * row["num_blocks"] - 2),
                "offload": 2 * params * row["num_blocks"],
            }
    assert {row["schedule"] for row in result["rows"]} == {"deferred", "immediate", "megatrain", "zero3"}
    for row in result["published"]:
        assert abs(row["error"]) < 0.1 or row["why"]


def test_a_missing_machine_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--machines", str(tmp_path / "none.json")) == 2
    assert "none.json" in capsys.readouterr().err
