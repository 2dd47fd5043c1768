"""Retention keeps the newest checkpoint before steps that were skipped, until the run is healthy again."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import DivergedError, ModelError
from megatrain.train import loop
from megatrain.train.last_good import LastGood
from megatrain.train.loop import train
from tests.train.project import make_config


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "run/checkpoints").iterdir())


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let the update of step 3 destroy a weight, which is saved: the steps after it are skipped."""
    steps = loop.train_step

    def poison(run: Any) -> Any:
        row = steps(run)
        if run.step == 3:
            next(p for p in run.engine.model.parameters() if p.ndim == 2).data.fill_(float("nan"))
        return row

    monkeypatch.setattr(loop, "train_step", poison)
    return monkeypatch


SETTINGS: dict[str, Any] = {
    "checkpoint": {"every": 1, "keep_last": 2},
    "log": {"report": False},
    "memory": {"watch": "off"},  # which would notice that no update has done this
}


def test_weights_that_went_wrong_do_not_cost_the_last_good_checkpoint(
    tmp_path: Path, poisoned: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DivergedError) as diverged:
        train(make_config(tmp_path, optim={"max_skipped_steps": 7}, **SETTINGS))
    left = [f"step-{step:08d}" for step in (2, 3, 8, 9)]
    assert names(tmp_path) == left
    sound = tmp_path / "run/checkpoints" / left[0]
    assert f"go on from it with --resume {sound} and another --out" in str(diverged.value)


def test_a_resumed_run_refuses_such_weights_and_the_last_good_checkpoint_stays(
    tmp_path: Path, poisoned: pytest.MonkeyPatch
) -> None:
    train(make_config(tmp_path, train={"steps": 5}, **SETTINGS))
    poisoned.undo()
    with pytest.raises(
        ModelError, match=r"step-00000005/.*: \S+ has [\d,]+ of [\d,]+ values that are not finite"
    ) as refused:
        train(make_config(tmp_path, **SETTINGS))
    named = tmp_path / "run/checkpoints/step-00000002"
    assert f"surely sound is {named}; go on from it with --resume {named} and another" in str(refused.value)
    left = [f"step-{step:08d}" for step in (2, 3, 4, 5)]
    assert names(tmp_path) == left
    sound = tmp_path / "run/checkpoints" / left[0]
    train(make_config(tmp_path, "again", **SETTINGS), resume=str(sound))
    assert (tmp_path / "again/hf/model.safetensors").is_file()


def test_a_healthy_run_lets_go_of_it() -> None:
    known = LastGood()
    for step in range(1, 13):
        known.take(is_skipped=step == 5)
        if step % 2 == 0:
            known.save(step, keep_last=2)
            # 4 and 2 are the newest before step 5, none after 4; 8 and 10 had no skipped step before them
            assert known.kept == ([2, 4] if step in (6, 8) else []), step
    again = LastGood()
    again.restore(known.state())
    assert again == known


def test_nothing_is_kept_where_nothing_was_saved_before() -> None:
    known = LastGood()
    known.take(is_skipped=True)
    known.save(1, keep_last=2)
    assert known.sound is None


def test_a_checkpoint_after_which_a_step_was_sound_is_enough() -> None:
    known = LastGood()
    for step in range(1, 7):
        known.take(is_skipped=step == 6)
        if step in (2, 4):
            known.save(step, keep_last=2)
    assert (known.kept, known.sound) == ([4], 4)


@pytest.mark.parametrize("num_skipped", [0, 1, 2])
def test_a_save_that_fails_leaves_the_counts_of_never_having_tried(num_skipped: int) -> None:
    """Whatever was sound and what was skipped before it, and while it was written."""
    steps = range(1, 9)
    for skipped in combinations(steps, num_skipped):
        for begun in steps:
            for lost in range(begun, 9):
                tried, never = LastGood(), LastGood()
                tried.save(0, keep_last=1)
                never.save(0, keep_last=1)
                for step in steps:
                    for known in (tried, never):
                        known.take(is_skipped=step in skipped)
                    if step == begun:
                        tried.save(step, keep_last=1)
                    if step == lost:
                        tried.lose(begun)
                assert tried.state() == never.state(), (skipped, begun, lost)


def test_a_save_that_fails_after_a_skipped_step_is_no_sign_of_health() -> None:
    """The next checkpoint that is saved holds what the skipped step was skipped for."""
    known = LastGood()
    known.save(1, keep_last=1)
    known.take(is_skipped=True)
    known.save(2, keep_last=1)
    known.lose(2)
    known.take(is_skipped=False)
    known.save(3, keep_last=1)
    assert (known.kept, known.num_healthy) == ([1], 0)
