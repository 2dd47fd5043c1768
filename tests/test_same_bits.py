"""Two checkouts side by side: equal runs are found equal, and one flipped bit a difference."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.training import checkout_worker as worker
from benchmarks.training.checkout_runs import COMMANDS, RUNS
from benchmarks.training.same_bits import compare
from megatrain.config.choice import Choice

ROOT = Path(__file__).parent.parent


def flip(tensor: Tensor, *, byte: int, bit: int) -> None:
    """Flip one bit in place."""
    tensor.detach().view(-1).view(torch.uint8)[byte] ^= 1 << bit


def report(**values: str) -> dict[str, Any]:
    return {"values": values, "asked_but_not_so": []}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
@pytest.mark.parametrize(("byte", "bit"), [(0, 0), (37, 3), (-1, 7)])
def test_one_flipped_bit_is_found_and_named(dtype: torch.dtype, byte: int, bit: int) -> None:
    one = torch.arange(64).view(8, 8).to(dtype)
    other = one.clone()
    assert worker.digest(other) == worker.digest(one)
    flip(other, byte=byte, bit=bit)
    found = compare(
        report(same="s", weight=worker.digest(one)), report(same="s", weight=worker.digest(other))
    )
    assert found == {"values": 2, "differences": ["weight differs"]}


def test_numbers_that_compare_equal_are_told_apart_by_their_bits() -> None:
    zero = torch.zeros(3)
    assert worker.digest(zero) != worker.digest(-zero)
    assert worker.digest(zero) != worker.digest(zero.to(torch.int32))
    assert worker.digest(zero) != worker.digest(zero.view(3, 1))
    nan = torch.full((3,), torch.nan)
    assert worker.digest(nan) == worker.digest(nan.clone())


def test_what_is_missing_failed_empty_or_otherwise_arranged_is_a_difference() -> None:
    assert compare(report(a="1"), report(a="1", b="2"))["differences"] == ["b is only in the other"]
    assert compare(report(a="1"), {"error": "no"}) == {"values": 0, "differences": ["no"]}
    assert compare(report(), report())["differences"] == ["no value was reported"]
    other = {**report(a="1"), "asked_but_not_so": ["lockstep is 1, not 2"]}
    assert compare(report(a="1"), other)["differences"] == ["not arranged as asked: lockstep is 1, not 2"]


def test_every_run_spells_out_every_choice() -> None:
    for run in RUNS.values():
        assert {field.name for field in fields(Choice)} <= run["attach"].keys() | run["choice"].keys()
    choices = [run["choice"] for run in RUNS.values()]
    assert {choice["updates"] for choice in choices} == {"deferred", "immediate", "serial"}
    assert {choice["boundaries"] for choice in choices} == {"device", "host", "nvme"}
    policies = {policy for choice in choices for policy in choice["activations"]}
    assert policies == {"keep", "offload", "recompute", "recompute_cheap", "drop_boundary"}


def test_one_bit_of_one_initial_weight_changes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**RUNS["llama bf16 deferred, a policy per layer, resident"], "steps": 1}
    make_model = worker.make_model
    runs = []
    for name, bit in (("one", None), ("same", None), ("other", 0)):

        def changed(config: dict[str, Any], bit: int | None = bit) -> Any:
            model = make_model(config)
            if bit is not None:
                flip(model.model.layers[2].mlp.up_proj.weight, byte=400, bit=bit)
            return model

        monkeypatch.setattr(worker, "make_model", changed)
        (tmp_path / name).mkdir()
        runs.append(worker.run(asked, tmp_path / name))
    one, same, other = runs
    assert compare(one, same)["differences"] == []
    assert compare(one, same)["values"] > 200
    assert "master model.layers.2.mlp.up_proj.weight differs" in compare(one, other)["differences"]


@pytest.mark.parity
def test_one_bit_of_one_initial_weight_changes_a_run_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = COMMANDS["two ranks: llama bf16, moments in bf16, rounds"]
    (tmp_path / "one").mkdir()
    one = worker.run_command(asked, tmp_path / "one")
    make_model = worker.make_model

    def changed(config: dict[str, Any]) -> Any:
        model = make_model(config)
        flip(model.model.layers[2].mlp.up_proj.weight, byte=403, bit=0)  # of those that bf16 keeps
        return model

    monkeypatch.setattr(worker, "make_model", changed)
    (tmp_path / "other").mkdir()
    other = worker.run_command(asked, tmp_path / "other")
    assert "hf model.layers.2.mlp.up_proj.weight differs" in compare(one, other)["differences"]
    assert len(one["values"]) > 100


@pytest.mark.parity
def test_a_checkout_trains_to_the_bits_of_itself() -> None:
    command = [sys.executable, "-m", "benchmarks.training.same_bits", "--reference", str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" equal\n") == len({**RUNS, **COMMANDS}) == 12 + 6


@pytest.mark.parity
def test_the_cpu_time_of_a_step_is_that_of_both_checkouts() -> None:
    command = [sys.executable, "-m", "benchmarks.training.step_cpu_time", "--reference", str(ROOT)]
    command += ["--pairs", "1", "--turns", "3", "--steps", "2", "--warm-up", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["by_pair"] == [result["other_over_reference"]]
    for side in ("reference", "other"):
        assert 0 < result[f"{side}_cpu_s_per_step"]["min"] <= result[f"{side}_cpu_s_per_step"]["max"]
