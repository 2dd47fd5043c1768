"""Jumps of the loss: the rule, what a run does about them, and that it goes on to the same bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import DivergedError
from megatrain.train.loop import train
from megatrain.train.spikes import LEAST, Spikes
from tests.train.project import make_config
from tests.train.test_loop import rows_of, state_of


def after(losses: list[float]) -> Spikes:
    known = Spikes()
    for loss in losses:
        known.take(loss)
    return known


def test_a_jump_is_far_above_the_median_and_the_spread() -> None:
    noisy = [2.0 + 0.1 * (-1) ** number for number in range(LEAST)]
    limit = 2.0 + 8 * 1.4826 * 0.1
    assert after(noisy).take(limit + 1e-6) == pytest.approx(limit)
    assert after(noisy).take(limit - 1e-6) is None
    steady = [2.0] * LEAST  # no spread at all: a tenth of the median
    assert after(steady).take(2.201) == pytest.approx(2.2)
    assert after(steady).take(2.199) is None
    assert after(steady).take(1.0) is None
    assert after(steady[1:]).take(100.0) is None, "too few to say"
    assert after(steady).take(math.nan) is None, "that is for the gradient's norm to say"


def test_a_loss_that_stays_high_is_soon_no_jump_and_the_state_goes_on() -> None:
    known = after([2.0] * 64)
    seen = [known.take(3.0) is not None for _ in range(40)]
    assert seen == [True] * 32 + [False] * 8
    other = Spikes()
    other.restore(known.state())
    assert [other.take(5.0), other.state()] == [known.take(5.0), known.state()]


@pytest.mark.usefixtures("jump_at_5")
def test_a_jump_is_told_and_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(make_config(tmp_path, train={"steps": 6}))
    rows = rows_of(tmp_path / "run")
    assert [row.get("spike_above") for row in rows] == [None] * 4 + [1.5, None]
    assert not any(row["skipped"] for row in rows)
    assert f"step 5: the loss jumped to {rows[4]['loss']:.4g}, above 1.5 (train.on_spike)" in caplog.text


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("jump_at_5")
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_step_that_is_skipped_for_a_jump_changes_no_weight(tmp_path: Path, device: str) -> None:
    """And the run goes on from a checkpoint before it to the same bits."""
    options: dict[str, Any] = {
        "train": {"steps": 7, "on_spike": "skip", "device": device, "reproducible": True},
        "memory": {"activations": "recompute", "lockstep": 2, "resident_blocks": 0, "num_slots": 2},
        "checkpoint": {"every": 1, "keep_last": None},
    }
    train(make_config(tmp_path, **options))
    run = tmp_path / "run"
    rows = rows_of(run)
    assert [row["skipped"] for row in rows] == [False] * 4 + [True, False, False]
    before, after_it, later = (
        (run / f"checkpoints/step-0000000{n}/model.safetensors").read_bytes() for n in (4, 5, 6)
    )
    assert before == after_it != later
    part = run / "checkpoints/step-00000003"
    train(make_config(tmp_path, "rest", **options), resume=str(part))
    left, right = state_of(tmp_path / "rest"), state_of(run)
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())


@pytest.mark.usefixtures("jump_at_5")
def test_a_jump_may_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"step 5: the loss jumped .*step-00000004.*train\.on_spike=skip"):
        train(make_config(tmp_path, train={"steps": 6, "on_spike": "stop"}))
    train(make_config(tmp_path, train={"steps": 6, "on_spike": "skip"}))
    assert [row["skipped"] for row in rows_of(tmp_path / "run")] == [False] * 4 + [True, False]
