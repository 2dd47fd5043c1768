"""A value that changes in RAM by itself ends a run, and names the checkpoint that is from before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.cli import main
from megatrain.config import Config
from megatrain.errors import HardwareError
from megatrain.train import loop
from megatrain.train.loop import train
from tests.train.project import make_config
from tests.train.test_loop import assert_same_runs


def flip_after(monkeypatch: pytest.MonkeyPatch, step: int, plane: str) -> None:
    """Flip a bit of a plane once, after the update of a step and before anything else."""
    take = loop.train_step
    left = [step]

    def call(run: Any) -> Any:
        row = take(run)
        if left == [run.step]:
            left.clear()
            run.engine.settle()
            block = run.engine.host.blocks[0]
            entry = next(e for e in block.layout.entries if plane != "frozen" or e.state_offset is None)
            whole = (
                block.working[entry.byte_offset :] if plane in ("working", "frozen") else block.planes[plane]
            )
            whole.numpy().view("u1")[5] ^= 1
        return row

    monkeypatch.setattr(loop, "train_step", call)


def run_of(root: Path, out: str = "run", watch: Any = 1.0, **sections: Any) -> Config:
    return make_config(root, out, **{"memory": {"watch": watch, "fragments": False}, **sections})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 12 steps that nobody watches."""
    return train(run_of(tmp_path_factory.mktemp("whole"), watch="off"))


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("plane", ["working", "exp_avg", "exp_avg_sq"])
def test_the_same_command_goes_on_from_a_checkpoint_before_the_flip(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plane: str,
) -> None:
    config = run_of(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with monkeypatch.context() as patch:
        flip_after(patch, 6, plane)
        with pytest.raises(SystemExit) as end:
            main(["train", str(file)])
    assert end.value.code == 10
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    (said,) = errors
    assert f"in block 0, plane {plane}, " in said
    assert "after the update of step 6, as was noticed in step 7" in said
    newest = tmp_path / "run/checkpoints/step-00000004"
    assert (
        f"the newest that is saved, {newest}, is from before that: the same command goes on from it" in said
    )
    assert saved(tmp_path / "run") == ["step-00000004"]
    train(config)
    assert_same_runs(tmp_path / "run", whole)


def test_a_checkpoint_that_may_have_the_flip_is_not_the_one_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in RAM when step 8 is saved, and is noticed at the next update."""
    flip_after(monkeypatch, 8, "exp_avg")
    with pytest.raises(HardwareError, match="noticed in step 9") as caught:
        train(run_of(tmp_path))
    assert saved(tmp_path / "run") == ["step-00000004", "step-00000008"]
    sound = tmp_path / "run/checkpoints/step-00000004"
    assert f"from before that is {sound}: go on from it with --resume {sound} and another" in str(
        caught.value
    )


@pytest.mark.parametrize("step", [3, 12])
def test_before_the_first_checkpoint_and_in_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    flip_after(monkeypatch, step, "working")
    with pytest.raises(HardwareError) as caught:
        train(run_of(tmp_path, checkpoint={"every": None}))
    assert "no checkpoint is from before that, so begin again" in str(caught.value)
    assert not (tmp_path / "run/checkpoints").exists()
    assert not (tmp_path / "run/hf").exists()


def test_a_frozen_base_is_watched(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a rotation of four, and it is noticed before the run ends."""
    flip_after(monkeypatch, 10, "frozen")
    with pytest.raises(HardwareError, match="which is frozen") as caught:
        train(
            run_of(
                tmp_path,
                watch=0.25,
                model={"path": str(whole / "hf"), "init": "pretrained"},
                lora={"r": 2},
                checkpoint={"every": 2, "keep_last": None},
            )
        )
    assert "step-00000012" not in saved(tmp_path / "run")
    since = caught.value.since
    assert since <= 10
    earlier = [name for name in saved(tmp_path / "run") if int(name[5:]) < since]
    assert earlier[-1] in str(caught.value)


def test_what_is_not_watched_is_not_noticed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_after(monkeypatch, 6, "exp_avg")
    train(run_of(tmp_path, watch="off"))
    with pytest.raises(AssertionError):
        assert_same_runs(tmp_path / "run", whole)


def test_a_run_that_is_watched_has_the_bits_of_one_that_is_not(whole: Path, tmp_path: Path) -> None:
    assert_same_runs(train(run_of(tmp_path, watch="auto")), whole)
    plan = json.loads((tmp_path / "run/plan.json").read_text())["watching"]
    assert plan["rotation"] >= 1
    assert plan["share"] == 1 / plan["rotation"]
    assert plan["unwatched_bytes"] == plan["frozen_bytes"] == 0


@pytest.mark.parametrize("wish", [0, 1.5, "half", True])
def test_a_share_is_between_0_and_1(tmp_path: Path, wish: Any) -> None:
    with pytest.raises(Exception, match=r"memory\.watch"):
        run_of(tmp_path, watch=wish)


def test_a_commit_on_drives_is_named_where_it_is_the_newest_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third step is committed; the flip comes after the fourth, and after the sixth."""
    for step, words in ((4, "step 3, which is committed on the drives, is from before"), (6, "begin again")):
        tiers = {"ram": 1 << 26, "nvme": [str(tmp_path / f"drive{step}")]}
        memory = {"watch": 1.0, "fragments": False, "tiers": tiers, "commit_every": 3}
        settings: dict[str, Any] = {"memory": memory, "checkpoint": {"every": None}}
        with monkeypatch.context() as patch:
            flip_after(patch, step, "working")
            with pytest.raises(HardwareError, match=words):
                train(make_config(tmp_path, f"run{step}", **settings))
