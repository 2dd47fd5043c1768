"""The commands themselves, with processes as users start them: agents of torchrun, a rank that is stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.train.records.json_lines import read_rows
from tests.train.killed_once import killed_once
from tests.train.project import make_config
from tests.train.test_loop import assert_same_runs

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
WAIT_S = 600


def start(module: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, **pipes)


def config_of(root: Path, out: str, shards: int, **sections: Any) -> Path:
    """Write the file of a run that saves every other step."""
    train = {"grad_accumulation": 4, "steps": 10, "precision": "bf16"}
    parallel = {"shards": shards, "timeout": 30}
    memory = {"activations": "recompute", "fragments": False}
    config = make_config(
        root, out, train=train, parallel=parallel, checkpoint={"every": 2}, memory=memory, **sections
    )
    path = root / f"{out}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    return path


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    return said


def rank_of(config: Path, rank: int) -> int | None:
    """Find the process of a rank of a run."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (
                (place / name).read_bytes().split(b"\0") for name in ("cmdline", "environ")
            )
        except OSError:
            continue
        if str(config).encode() in command and f"RANK={rank}".encode() in environment:
            return int(place.name)
    return None


@pytest.mark.parity
def test_an_agent_of_torchrun_that_is_not_needed_idles_and_ends_well(tmp_path: Path) -> None:
    ended(start("megatrain", "train", config_of(tmp_path, "alone", 2)))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = ["--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    config = config_of(tmp_path, "shared", 2)
    of_agent: list[str | Path] = [
        *meeting,
        "--rdzv-id",
        "1",
        "--nproc-per-node",
        "1",
        "-m",
        "megatrain",
        "train",
        config,
    ]
    said = [ended(agent) for agent in [start("torch.distributed.run", *of_agent) for _ in range(3)]]
    assert "".join(said).count("2 of 3 ranks train") == 1
    assert next(iter(read_rows(tmp_path / "shared/events.jsonl")))["ranks"] == 2
    assert_same_runs(tmp_path / "shared", tmp_path / "alone")


@pytest.mark.parity
def test_a_run_one_of_whose_ranks_is_stopped_goes_on_with_two_to_the_same_bits(tmp_path: Path) -> None:
    ended(start("megatrain", "train", config_of(tmp_path, "alone", 4)))
    config = config_of(tmp_path, "stopped", 4)
    run = start("megatrain", "train", config, "--ranks", "4")
    until = time.monotonic() + WAIT_S
    while not list((tmp_path / "stopped").glob("checkpoints/step-*")) and run.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    process = rank_of(config, 2)
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    ended(run)
    rows = {row["event"]: row for row in read_rows(tmp_path / "stopped/events.jsonl")}
    assert f"rank 2 (process {process} on " in rows["error"]["text"]  # silent, or hanging: what is seen first
    assert (rows["ranks"]["codes"]["2"], rows["ranks"]["left"]) == (-signal.SIGKILL, 2)
    assert (rows["start"]["ranks"], rows["resume"]["ranks"]) == (4, 2)
    assert_same_runs(tmp_path / "stopped", tmp_path / "alone")


@pytest.mark.parity
def test_ranks_of_which_one_is_killed_start_again_with_as_many(tmp_path: Path) -> None:
    """The first one is killed when it has saved step 4; with `--restarts`, both go on."""
    config = config_of(tmp_path, "killed", 2)
    whole = config_of(tmp_path, "whole", 2)
    run = subprocess.run(
        [sys.executable, "-m", "megatrain", "train", config, "--ranks", "2", "--restarts", "3"],
        env=ENVIRONMENT | killed_once(tmp_path, ENVIRONMENT["PYTHONPATH"]),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert run.returncode == 0, run.stderr
    assert "the run was killed (SIGKILL)" in run.stderr
    assert "starting it again (3 starts left)" in run.stderr
    rows = {row["event"]: row for row in read_rows(tmp_path / "killed/events.jsonl")}
    assert (rows["ranks"]["codes"]["0"], rows["ranks"]["left"]) == (-signal.SIGKILL, 2)
    assert (rows["start"]["ranks"], rows["resume"]["ranks"]) == (2, 2)
    ended(start("megatrain", "train", whole))
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")
