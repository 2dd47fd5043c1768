"""A step for which the device has no room runs again in smaller rounds, and ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import CapacityError
from megatrain.train import loop
from megatrain.train.faults import smaller_rounds
from megatrain.train.loop import train
from megatrain.train.records.json_lines import read_rows
from megatrain.train.run import Run
from tests.train.project import make_config, write_corpus, write_model_with_experts
from tests.train.test_loop import assert_same_runs, rows_of


def config_of(root: Path, *, lockstep: int = 4, **sections: dict[str, Any]) -> Any:
    train_section = {"steps": 5, "micro_batch_size": 1, "grad_accumulation": 4, "device": "emulated"}
    options: dict[str, Any] = {
        "train": train_section | sections.pop("train", {}),
        "memory": {"lockstep": lockstep, "activations": "recompute", "on_mismatch": "stop"},
        "checkpoint": {"every": None},
        "log": {"report": False},
    }
    return make_config(root, **options | sections)


def fill_device(patch: pytest.MonkeyPatch, most: int, *, step: int = 2, backward: bool = False) -> list[int]:
    """Let the device have no room for more micro-batches together, from a step on; return the tries."""
    steps, tries, runs = loop.train_step, [], []
    owner, name = (torch.autograd, "backward") if backward else (torch.nn.functional, "silu")
    function = getattr(owner, name)

    def stepped(run: Run) -> Any:
        runs.append(run)
        return steps(run)

    def trapped(*args: Any, **given: Any) -> Any:
        if runs and runs[-1].step >= step and runs[-1].engine.choice.lockstep > most:
            tries.append(runs[-1].engine.choice.lockstep)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return function(*args, **given)

    patch.setattr(loop, "train_step", stepped)
    patch.setattr(owner, name, trapped)
    return tries


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    train(config_of(root))
    return root / "run"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("step", [0, 2])
def test_step_runs_again_in_smaller_rounds_to_the_same_bits(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: int,
    backward: bool,
) -> None:
    tries = fill_device(monkeypatch, 2, step=step, backward=backward)
    train(config_of(tmp_path))
    assert tries == [4], "once, and the run keeps to the smaller rounds"
    assert_same_runs(tmp_path / "run", whole)
    said = (
        f"the device had no room for step {step + 1} (CUDA out of memory. Tried to allocate 2 GiB.), so it "
        "runs again, with 2 of its micro-batches together in place of 4; no bit changes, and the run goes on "
        "so"
    )
    assert said in caplog.messages
    replans = [row for row in read_rows(tmp_path / "run/events.jsonl") if row["event"] == "replan"]
    assert [(row["step"], row["reason"]) for row in replans] == [(step, said)]


def test_sums_of_more_rounds_have_the_same_bits_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "again"):
        (tmp_path / name).mkdir()
        if name == "again":
            tries = fill_device(monkeypatch, 2)
        train(config_of(tmp_path / name, train={"precision": "bf16"}))
    assert tries == [4]
    assert_same_runs(tmp_path / "again/run", tmp_path / "whole/run")


def test_later_step_may_need_smaller_rounds_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = loop.train_step
    tries = fill_device(monkeypatch, 2)
    more = fill_device(monkeypatch, 1, step=3)
    train(config_of(tmp_path))
    assert (tries, more) == ([4], [2])
    assert_same_runs(tmp_path / "run", whole)
    assert loop.train_step is not steps


@pytest.mark.parametrize(("lockstep", "most"), [(4, 1), pytest.param(1, 0, marks=pytest.mark.parity)])
def test_step_that_finds_no_room_then_either_ends_the_run_and_is_not_lost(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lockstep: int, most: int
) -> None:
    with monkeypatch.context() as patch:
        tries = fill_device(patch, most)
        with pytest.raises(CapacityError, match=r"^device memory ran out in step 3: .* Step 2 is saved in "):
            train(config_of(tmp_path, lockstep=lockstep))
    assert tries == ([1] if lockstep == 1 else [4, 2])
    train(config_of(tmp_path))
    assert_same_runs(tmp_path / "run", whole)


def test_choice_that_the_plan_has_no_room_for_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        fits = False

    monkeypatch.setattr(smaller_rounds, "plan_of", lambda *_: Full)
    tries = fill_device(monkeypatch, 2)
    with pytest.raises(CapacityError, match=r"Step 2 is saved in "):
        train(config_of(tmp_path))
    assert tries == [4]


def test_experts_of_a_step_that_runs_again_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    for name in ("whole", "again"):
        root = tmp_path / name
        (root / "model").mkdir(parents=True)
        write_model_with_experts(root / "model")
        write_corpus(root / "corpus.txt")
        config = config_of(root)
        if name == "again":
            tries = fill_device(monkeypatch, 2, backward=True)
        train(config)
        rows.append([row["experts"] for row in rows_of(root / "run")])
    assert tries == [4]
    assert rows[0] == rows[1]
