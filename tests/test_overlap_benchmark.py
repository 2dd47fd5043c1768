"""`benchmarks/overlap/emulated.py` says what it promises; times are never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KEYS = (
    "step_over_bound",
    "speedup_over_megatrain_schedule",
    "speedup_over_zero3_schedule",
    "optimizer_hidden",
    "depth_spread",
)
BUSY = 0.03
"""How much shorter than the bound a step may look where a late wake-up delays the mark that it begins at."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    command = [sys.executable, "-m", "benchmarks.overlap.emulated", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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


@pytest.mark.slow
def test_a_quick_run_reports_physical_figures(tmp_path: Path) -> None:
    machines = write_machines(tmp_path / "machines.json")
    done = run("--quick", "--seconds", "0.25", "--machines", str(machines), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert json.loads((tmp_path / "out").read_text()) == result
    assert all(isinstance(result[key], float) for key in KEYS)
    assert {"hardware", "machines", "assumptions", "claims", "published"} <= result.keys()
    assert result["machines"]["h100-pcie5"]["h2d_bytes_per_s"] == 5e10

    assert result["speedup_over_megatrain_schedule"] > 1
    assert result["speedup_over_zero3_schedule"] > 1
    assert 0 <= result["optimizer_hidden"] <= 1
    params = result["assumptions"]["block_params"]
    for row in result["rows"]:
        assert row["step_over_bound"] > 1 - BUSY
        assert -BUSY < row["device_idle"] < 1
        if row["schedule"] in ("deferred", "immediate"):
            assert row["program_bytes"] == {
                "fetch": 2 * params * (2 * row["num_blocks"] - 2),
                "offload": 2 * params * row["num_blocks"],
            }
    assert {row["schedule"] for row in result["rows"]} == {"deferred", "immediate", "megatrain", "zero3"}
    for row in result["published"]:
        assert abs(row["error"]) < 0.1 or row["why"]


def test_a_missing_machine_file_is_named(tmp_path: Path) -> None:
    done = run("--machines", str(tmp_path / "none.json"))
    assert done.returncode == 2
    assert "none.json" in done.stderr
