"""The benchmark scripts run and say what they promise; what they measure on a test machine means nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RATIOS = ("streamed_over_resident_recompute", "streamed_over_resident_keep", "streamed_over_roofline_128")


def run(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script; returns the JSON object on the last line of its output."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.slow
def test_streaming_reports_ratios_of_equal_losses(tmp_path: Path) -> None:
    result = run("streaming.py", "--quick", "--out", str(tmp_path / "out.json"))
    assert all(result[name] > 0 for name in RATIOS)
    assert result["details"]["streamed_over_roofline_128"]["bytes_moved_per_step"] > 0
    assert {"hardware", "config", "details"} <= result.keys()
    assert json.loads((tmp_path / "out.json").read_text()) == result


@pytest.mark.slow
def test_gpu_suite_passes_a_dry_run(tmp_path: Path) -> None:
    result = run("gpu_suite.py", "--dry-run", "--out", str(tmp_path))
    steps = ("environment", "rates", "parity", "races", "speed_1b", "speed_8b")
    assert [result[step]["status"] for step in steps] == ["ok"] * len(steps)
    assert result["parity"]["num_bitwise"] == result["parity"]["num_cases"] > 0
    assert len(result["speed_8b"]["runs"]) == 2
    assert json.loads((tmp_path / "suite.json").read_text()).keys() == set(steps)


def test_gpu_suite_refuses_an_unknown_step(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu_suite.py"),
        "--out",
        str(tmp_path),
        "--steps",
        "parity,sped",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown steps: sped" in done.stderr
