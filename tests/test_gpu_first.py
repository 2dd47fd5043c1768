"""The first ten minutes on a GPU, on the device made of host memory: every step, and steps that go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import ranks
from benchmarks.gpu.first import first_cases
from benchmarks.gpu.run import Record
from benchmarks.gpu_first import STEPS, table
from tests.host_device import build

ROOT = Path(__file__).parents[1]
SHORT = ("imports", "smoke", "races", "adamw")
"""What `make test` runs: in one process, which those that take times are not."""
BLOCKED = ("datasets", "pyarrow", "pydantic", "typer", "rich", "liger_kernel", "peft", "pynvml")


def first(
    *arguments: str | Path, command: str = "-m", **environment: str
) -> subprocess.CompletedProcess[str]:
    name = "benchmarks.gpu_first" if command == "-m" else None
    words = [sys.executable, *(["-m", name] if name else [command]), *map(str, arguments)]
    return subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environment}
    )


def on_test_device(out: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """Run steps with tiny shapes; returns what `first.json` has."""
    build.build_or_skip()
    tiny = ("--tiny", "--device", "host", "--budget-s", "1800", "--out", out)
    done = first(*tiny, *arguments, **environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads((out / "first.json").read_text())
    return found


def block(folder: Path, *packages: str) -> dict[str, str]:
    """Return an environment in which these packages cannot be imported."""
    for name in packages:
        (folder / f"{name}.py").write_text(
            f"raise ModuleNotFoundError('No module named {name}', name='{name}')"
        )
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_steps_run_on_the_test_device_without_what_is_optional(tmp_path: Path) -> None:
    (tmp_path / "blocked").mkdir()
    environment = block(tmp_path / "blocked", *BLOCKED)
    whole = on_test_device(tmp_path / "out", "--steps", ",".join(SHORT), **environment)
    steps = whole["steps"]
    assert list(steps) == list(SHORT)
    packages = {row["package"]: row for row in steps["imports"]["packages"]}
    assert set(BLOCKED) <= {name for name, row in packages.items() if "error" in row}
    assert packages["pyarrow"]["lost"] == "parquet files"
    assert whole["hardware"]["torch"] == packages["torch"]["version"]
    assert steps["smoke"]["device_name"] == "host memory"
    assert all(row["is_bitwise"] for row in steps["adamw"]["cases"])
    assert [run["differing"] for run in steps["races"]["runs"]] == [[], []]


@pytest.mark.parity
@pytest.mark.timeout(1800)
def test_the_whole_runs_on_the_test_device(tmp_path: Path) -> None:
    steps = on_test_device(tmp_path)["steps"]
    assert list(steps) == list(STEPS)
    assert {result["status"] for result in steps.values()} == {"ok"}
    assert steps["parity"]["num_bitwise"] == steps["parity"]["num_cases"] == 8
    locks = steps["locking"]["locks"]
    assert [(row["is_locked"], row["is_touched"]) for row in locks] == [(True, True)] * 3 + [(True, False)]
    assert steps["syncs"]["num_launching"] == 0
    assert [row["tokens"] for row in steps["streamed"]["overlap"]] == [64, 64]
    for row in steps["streamed"]["overlap"]:
        assert min(row["planned_s"], row["copies_s"], row["compute_s"]) > 0
        assert row["planned_s"] >= max(row["copies_s"], row["compute_s"])
        assert row["busy"]["fetch"] > 0
    assert [run["label"] for run in steps["side_by_side"]["runs"]] == ["plain torch", "streamed", "kept"]
    assert min(steps["side_by_side"]["over_plain"].values()) > 0
    assert {row["seq_len"] for row in steps["long_attention"]["attention"]} == {256}
    assert [run["gathers"] for run in steps["ranks"]["runs"] if run["is_bitwise"]] == [False, True]
    runs = steps["shape"]["runs"]
    assert [run["label"] for run in runs] == ["compile off", "compile on"]
    assert runs[0]["num_graphs"] == 0 < runs[1]["num_graphs"]
    for run in runs:
        assert (tmp_path / run["trace"]).stat().st_size > 1000
        assert run["longest"]
        assert min(run["grad_norms"]) > 0
    for facts in steps["shape"]["plan_against_fact"]:
        for exact in ("device_pool_bytes", "host_plane_bytes"):
            assert facts[exact]["planned"] == facts[exact]["measured"]
        assert facts["step_s"]["planned"] > 0


def test_it_runs_as_a_script_and_refuses_unknown_steps_and_devices(tmp_path: Path) -> None:
    done = first("--out", tmp_path, "--steps", "smoke,sped", command="benchmarks/gpu_first.py")
    assert done.returncode == 2
    assert "unknown steps: sped; there are imports, smoke" in done.stderr
    done = first(
        "--out", tmp_path, "--steps", "smoke", "--device", "cuda:7", command="benchmarks/gpu_first.py"
    )
    assert done.returncode == 1
    assert "FAILED  smoke" in done.stdout
    assert "ConfigError: device is 'cuda:7'" in done.stdout
    assert "it came as far as: the device" in done.stdout


def test_the_parity_cases_have_every_kind_of_activations_in_both_precisions() -> None:
    cases = list(first_cases())
    assert len(cases) == 8
    assert {case["precision"] for case in cases} == {"fp32", "bf16"}
    assert len({str(case["activations"]) for case in cases}) == 6
    assert {case["family"] for case in cases} == {"llama_tied", "gemma2", "mixtral", "gpt2"}


def test_two_ranks_share_one_gpu_as_if_each_were_on_a_host_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses two ranks of one host on one device."""
    monkeypatch.setattr(ranks, "device_of", lambda is_dry: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(ranks, "run", lambda device, size, **settings: [settings["precision"]] * size)
    record = Record(tmp_path / "ranks.json")
    ranks.ranks(record, False)
    assert record.values["gist"] == ("2 runs of several ranks on one GPU equal one rank's, bit for bit")
    assert len({ranks.host_of("cuda", rank, 2)["NCCL_HOSTID"] for rank in range(2)}) == 2
    assert ranks.host_of("cuda", 0, 1) == ranks.host_of("host", 0, 2) == {}


def test_a_failed_step_is_a_line_with_its_first_error_and_how_far_it_came() -> None:
    lines = table(
        {
            "imports": {"status": "ok", "seconds": 3.2, "gist": "every package is there"},
            "smoke": {
                "status": "failed",
                "seconds": 1.0,
                "stage": "a copy",
                "error": "RuntimeError: no\nmore",
            },
            "rates": {"status": "skipped: no time left"},
        }
    )
    assert lines == [
        "ok      imports       3 s  every package is there",
        "FAILED  smoke         1 s  RuntimeError: no",
        "                           it came as far as: a copy",
        "FAILED  rates         0 s  skipped: no time left",
    ]


HANGING = """
    import sys, threading, time, argparse
    from pathlib import Path
    from benchmarks.gpu import steps
    from benchmarks.gpu.steps import Runner, Step

    steps.HANG_S = 1.0
    steps.LEAST_S = 0.0

    def wait_for_ever(record, is_dry):
        record.add(stage="waiting")
        threading.Event().wait()

    def hang_in_c(record, is_dry):
        import ctypes
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # a thread that locks a mutex again waits for itself, signals or not
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)

    def crash(record, is_dry):
        import ctypes
        ctypes.string_at(0)

    def fail(record, is_dry):
        raise ValueError("no")

    def fine(record, is_dry):
        record.add(found=1)

    LIMITS = {"wait_for_ever": 1, "hang_in_c": 1, "crash": 300, "fail": 300, "fine": 300}
    TABLE = {name: Step("correctness", limit, 1, f"hanging:{name}") for name, limit in LIMITS.items()}

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("--out", type=Path)
        parser.add_argument("--child")
        parser.add_argument("--seconds", type=float)
        given = parser.parse_args()
        runner = Runner(module="hanging", steps=TABLE, out=given.out)
        if given.child:
            runner.run_here(given.child.split(","), given.seconds)
        else:
            runner.run_all(list(TABLE), 900)
"""


def test_a_step_that_hangs_or_crashes_says_where_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(textwrap.dedent(HANGING))
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "hanging", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("wait_for_ever", "hang_in_c", "crash", "fail", "fine")
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    assert found["wait_for_ever"]["status"] == "stopped after 1 s"
    assert "in wait_for_ever" in found["wait_for_ever"]["stack"]
    assert '"benchmarks/gpu/steps.py"' in found["wait_for_ever"]["stack"], "not where the checkout is"
    assert found["wait_for_ever"]["stage"] == "waiting"
    assert found["hang_in_c"]["status"].startswith("hung: ")
    assert "in hang_in_c" in found["hang_in_c"]["stack"]
    assert found["crash"]["status"] == "failed: the process ended with -11"
    assert "in crash" in found["crash"]["stack"]
    assert (found["fail"]["status"], found["fail"]["error"]) == ("failed", "ValueError: no")
    assert "stack" not in found["fail"]
    assert (found["fine"]["status"], found["fine"]["found"]) == ("ok", 1)
