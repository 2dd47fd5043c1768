"""The random search finds no fault but one that is put there, and takes away what a fault does not need."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.training.random_search import shrink
from benchmarks.training.random_search.forks import Outcome
from benchmarks.training.random_search.run import Differs, play
from benchmarks.training.random_search.settings import draw
from benchmarks.training.random_search.streamed import Streamed

ROOT = Path(__file__).parent.parent
SEED = 37  # qwen2 in bf16, a tree of four runs, three steps with an evaluation between them


def test_a_seed_draws_the_same_run_again_and_no_two_draw_one() -> None:
    drawn = [json.dumps(draw(seed)) for seed in range(200)]
    assert drawn == [json.dumps(draw(seed)) for seed in range(200)]
    assert len(set(drawn)) == 200


def test_a_random_run_equals_a_resident_model(tmp_path: Path) -> None:
    counts = play(draw(SEED), tmp_path)
    assert counts["step"] == 3
    assert counts["evaluate"] == 1


def test_one_bit_of_a_loss_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Streamed.backward

    def wrong(self: Streamed, *given: Any) -> Tensor:
        loss = backward(self, *given)
        return torch.nextafter(loss, torch.tensor(torch.inf))

    monkeypatch.setattr(Streamed, "backward", wrong)
    with pytest.raises(Differs, match=r"step: loss: 1 of 1 differ"):
        play(draw(SEED), tmp_path)


def test_what_a_fault_does_not_need_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of fragments with two micro-batches in lockstep stays; all else is as plain as can be."""

    def played(settings: dict[str, Any], _: float) -> Outcome:
        choice = settings["choice"]
        if choice["fragments"] and choice["lockstep"] > 1 and settings["num_micro_batches"] > 1:
            return Outcome(kind="differs", what=f"step: gradient of layers.{settings['seed']}.weight: 3 of 4")
        return Outcome(kind="equal")

    monkeypatch.setattr(shrink, "played", played)
    drawn = next(found for found in map(draw, range(1000)) if played(found, 0.0).kind == "differs")
    least, outcome = shrink.shrunk(copy.deepcopy(drawn), played(drawn, 0.0), 1.0)
    assert outcome.kind == "differs"
    held = {"fragments": True, "lockstep": drawn["choice"]["lockstep"]}
    assert least["choice"] == {**shrink.PLAIN_CHOICE, **held}
    assert len(least["events"]) == 1
    assert least["num_micro_batches"] == 2 or least["num_micro_batches"] == 2 * least["num_runs"]
    assert {name: least[name] for name in ("family", "lora", "tiers", "frozen")} == {
        "family": "llama",
        "lora": None,
        "tiers": None,
        "frozen": [],
    }


@pytest.mark.parity
@pytest.mark.timeout(900)
def test_no_run_of_two_hundred_differs(tmp_path: Path) -> None:
    """`benchmarks/results` holds a run of 1,000."""
    out = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.training.random_search",
        "--seeds",
        "5000:5200",
        "--jobs",
        "2",
    ]
    ended = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    found = json.loads(out.read_text())
    assert found["faults"] == {}, ended.stdout
    assert sum(found["runs"].values()) == 200
    assert found["runs"]["equal"] >= 160
    assert ended.returncode == 0
