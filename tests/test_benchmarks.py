"""The benchmark scripts run and say what they promise; what they measure on a test machine means nothing."""

from __future__ import annotations

import csv
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.distributed.matrix import summed
from benchmarks.plan import grid

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RATIOS = ("streamed_over_resident_recompute", "streamed_over_resident_keep", "streamed_over_roofline_128")


def run(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script; returns the JSON object on the last line of its output."""
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*/*.py")), ids=lambda path: path.stem)
def test_every_script_can_be_imported(script: Path) -> None:
    """So that a name of the package that is gone is found here, and not in the next measurement."""
    importlib.import_module(f"benchmarks.{script.parent.name}.{script.stem}")


@pytest.mark.parity
def test_a_step_makes_fewer_calls_than_a_resident_one_under_torch_s_checkpoint() -> None:
    """Counts are exact on any machine; times are not asked for."""
    result = run("training.engine_over_resident", "--layers", "4", "--pairs", "1", "--warm-up", "1")
    assert result["python_calls_ratio"] < 0.62
    assert result["all_calls_ratio"] < 0.66


@pytest.mark.parity
def test_streaming_reports_ratios_of_equal_losses(tmp_path: Path) -> None:
    result = run("training.streaming", "--quick", "--out", str(tmp_path / "out.json"))
    assert all(result[name] > 0 for name in RATIOS)
    assert result["details"]["streamed_over_roofline_128"]["bytes_moved_per_step"] > 0
    assert {"hardware", "config", "details"} <= result.keys()
    assert json.loads((tmp_path / "out.json").read_text()) == result


@pytest.mark.parity
def test_cpu_rivals_train_alike_and_a_missing_one_says_why(tmp_path: Path) -> None:
    result = run("rivals.cpu", "--quick", "--deepspeed-python", str(tmp_path / "python"))
    details = result["details"]
    assert result["streamed_over_resident_8_micro_batches"] > 0
    assert details["streamed"]["losses"] == details["resident"]["losses"]
    assert result["streamed_over_fsdp2"] > 0
    assert details["fsdp2"]["losses"] == pytest.approx(details["resident"]["losses"], abs=1e-2)
    for name in ("streamed", "resident", "fsdp2"):
        assert details[name]["threads"] == result["config"]["threads"]
        assert details[name]["peak_rss_bytes"] > 0
    assert result["streamed_over_deepspeed"] is None
    assert "does not start: No such file" in details["deepspeed"]["reason"]


@pytest.mark.parity
def test_loss_curves_of_a_whole_run_are_equal_bit_for_bit(tmp_path: Path) -> None:
    result = run("training.loss_curve", "--quick", "--date", "2001-02-03", "--results", str(tmp_path))
    assert result["max_abs_difference"] == result["max_weight_difference"] == 0
    assert result["bitwise_equal_steps"] == result["steps"] == 20
    assert result["final_losses"]["streamed"] == result["final_losses"]["resident"]
    assert result["tokens"] == 20 * result["config"]["rows"] * result["config"]["seq_len"]
    stem = "2001-02-03-loss-curve-cpu-quick"
    assert json.loads((tmp_path / f"{stem}.json").read_text()) == result
    rows = list(csv.DictReader((tmp_path / f"{stem}.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 21)]
    assert all(row["streamed_loss"] == row["resident_loss"] and row["difference"] == "0" for row in rows)
    plot = ElementTree.fromstring((tmp_path / f"{stem}.svg").read_text())
    lines = plot.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [20, 20, 20]


@pytest.mark.parity
def test_loss_curve_reads_text_that_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(2):
        (text / f"{number}.txt").write_text("".join(f"{number} and {n * n}.\n" for n in range(3000)))
    result = run("training.loss_curve", "--quick", "--precision", "bf16", "--data", str(text))
    assert result["data"]["name"] == "0.txt, 1.txt"
    assert result["max_abs_difference"] == result["max_weight_difference"] == 0


@pytest.mark.parity
def test_compressed_moments_train_like_fp32_and_say_how_fast(tmp_path: Path) -> None:
    result = run("optimizer.state_compression", "--quick", "--date", "2001-02-03", "--results", str(tmp_path))
    found = result["scratch"]
    assert result["pretrained"] is None
    assert found["final_minus_fp32"].keys() == {"nudged", "bf16", "int8"}
    assert all(value != 0 for value in found["final_minus_fp32"].values())
    num_parameters, num_bytes = found["num_parameters"], found["host_bytes"]
    assert num_bytes["fp32"] - num_bytes["bf16"] == 4 * num_parameters
    assert set(result["kernels"]["speed_over_fp32"]) == {"bf16", "int8"}
    stem = "2001-02-03-state-compression-cpu"
    assert json.loads((tmp_path / f"{stem}.json").read_text()) == result
    rows = list(csv.DictReader((tmp_path / f"{stem}-scratch.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 13)]
    plot = ElementTree.fromstring((tmp_path / f"{stem}-scratch.svg").read_text())
    lines = plot.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [12] * 7


@pytest.mark.parity
def test_drives_are_compared_with_what_is_there(tmp_path: Path) -> None:
    result = run("store.nvme", "--directory", str(tmp_path), "--gib", "0.2", "--rounds", "1")
    rival = next(name for name in result["rates_gb_per_s"] if name != "ours").split()[0]
    assert result[f"write_over_{rival}"] > 0
    assert result[f"read_over_{rival}"] > 0
    assert result["config"]["bytes"] == 3 * (64 << 20)
    assert list(tmp_path.iterdir()) == []


def test_the_record_of_the_matrix_names_the_rows_that_failed() -> None:
    text = """<testsuite>
      <testcase classname="tests.t" name="test_a[one-2]" time="1.5" />
      <testcase classname="tests.t" name="test_a[two-4]" time="2.04"><failure>no</failure></testcase>
      <testcase classname="tests.t" name="test_a[three]" time="0.0"><error>no</error></testcase>
      <testcase classname="tests.t" name="test_b" time="0.5"><skipped /></testcase>
    </testsuite>"""
    assert summed(ElementTree.fromstring(text).iter("testcase")) == {
        "tests.t.test_a": {"passed": 1, "skipped": 0, "failed": ["two-4", "three"], "seconds": 3.5},
        "tests.t.test_b": {"passed": 0, "skipped": 1, "failed": [], "seconds": 0.5},
    }


def test_the_grid_of_plans_is_committed_and_tells_a_slower_one() -> None:
    kept = json.loads(grid.COMMITTED.read_text())["rows"]
    assert sorted(kept) == sorted(map(grid.name_of, grid.rows()))
    fits = {"fits": True, "tokens_per_s": 1000.0}
    assert not grid.compare(fits, {"fits": True, "tokens_per_s": 999.1})
    assert grid.compare(fits, {"fits": True, "tokens_per_s": 998.0}) == "0.9980 of its tokens per second"
    assert grid.compare(fits, {"fits": False, "problem": "device memory"}) == "no longer fits: device memory"
    assert not grid.compare({"fits": False}, fits)
