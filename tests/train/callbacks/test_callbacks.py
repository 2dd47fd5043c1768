"""Callbacks of transformers' Trainer in a run: what they are told, what they may ask for, failures."""

from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from megatrain.checkpoint.load import verify
from megatrain.config import Config
from megatrain.errors import CallbackError, ConfigError
from megatrain.train.callbacks.calls import Callbacks
from megatrain.train.loop import train
from megatrain.train.records.json_lines import read_rows
from tests.train.project import make_config, write_corpus
from tests.train.test_loop import rows_of, state_of

STEPS = {"steps": 4}
OPTIONS: dict[str, Any] = {
    "train": STEPS,
    "data": {"val_size": 0.1},
    "eval": {"every": 2},
    "checkpoint": {"every": 3, "background": False},
}


class Listener(TrainerCallback):
    """Notes every call, and what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logs: list[tuple[int, dict[str, float]]] = []
        self.seen: dict[str, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def called(args: Any, state: Any, control: Any, **values: Any) -> None:
            self.calls.append(name)
            self.seen = {**values, "args": args, "state": state}
            if name == "on_log":
                self.logs.append((state.global_step, values["logs"]))

        return called


@pytest.fixture(scope="module")
def listened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listener]:
    root, listener = tmp_path_factory.mktemp("listened"), Listener()
    train(make_config(root, log={"to": ["tensorboard"]}, **OPTIONS), callbacks=[listener])
    return root, listener


def test_events_come_in_the_order_of_the_trainer(listened: tuple[Path, Listener]) -> None:
    step = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log"]
    evaluated = [*step, "on_log", "on_evaluate", "on_save"]
    assert listened[1].calls == [
        *("on_train_begin", "on_epoch_begin"),
        *step,
        *evaluated,
        *(*step, "on_save"),
        *evaluated,
        "on_train_end",
    ]


def test_callbacks_are_told_what_the_run_records(listened: tuple[Path, Listener]) -> None:
    root, listener = listened
    told = [(step, logs) for step, logs in listener.logs if "loss" in logs]
    rows = rows_of(root / "run")
    assert [step for step, _ in told] == [1, 2, 3, 4]
    assert [logs["loss"] for _, logs in told] == [row["loss"] for row in rows]
    assert [logs["grad_norm"] for _, logs in told] == [row["grad_norm"] for row in rows]
    assert [logs["learning_rate"] for _, logs in told] == [row["lr"] for row in rows]
    state, args = listener.seen["state"], listener.seen["args"]
    standing = verify(max((root / "run/checkpoints").iterdir())).meta["evaluation"]
    assert (state.best_metric, state.best_global_step) == (standing["best_loss"], standing["best_step"])
    assert state.best_model_checkpoint == str(root / "run/checkpoints/step-00000004")
    assert (state.global_step, state.max_steps, state.num_input_tokens_seen) == (4, 4, rows[-1]["tokens"])
    assert (args.learning_rate, args.gradient_accumulation_steps, args.max_steps) == (1e-2, 2, 4)
    assert {"model", "processing_class", "optimizer", "lr_scheduler"} <= listener.seen.keys()


def test_tensorboard_s_file_has_every_number(listened: tuple[Path, Listener]) -> None:
    root, listener = listened
    events = EventAccumulator(str(root / "run/tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == {row["step"]: pytest.approx(row["loss"], rel=1e-6) for row in rows_of(root / "run")}
    evaluated = {event.step: event.value for event in events.Scalars("eval/loss")}
    told = {step: logs["eval_loss"] for step, logs in listener.logs if "eval_loss" in logs}
    assert evaluated == {step: pytest.approx(loss, rel=1e-6) for step, loss in told.items()}
    assert sorted(evaluated) == [2, 4]


def test_a_run_with_callbacks_equals_one_without(listened: tuple[Path, Listener], tmp_path: Path) -> None:
    train(make_config(tmp_path, **OPTIONS))
    left, right = state_of(listened[0] / "run"), state_of(tmp_path / "run")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())


class Wishing(TrainerCallback):
    """Asks for something at a step."""

    def __init__(self, step: int, wish: str) -> None:
        self.step, self.wish = step, wish

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == self.step:
            setattr(control, self.wish, True)
        return control


def test_a_callback_may_save_evaluate_and_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wishes = [Wishing(1, "should_save"), Wishing(2, "should_evaluate"), Wishing(3, "should_training_stop")]
    options = {**OPTIONS, "eval": {"every": None}, "checkpoint": {"every": None, "keep_last": None}}
    with pytest.raises(SystemExit) as ended, caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path, **options), callbacks=wishes)
    assert ended.value.code == 75
    assert "stopped by a callback after step 3" in caplog.text
    assert "evaluation after step 2 on val" in caplog.text
    found = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert found == [f"step-0000000{step}" for step in (1, 2, 3)]


class Sooner(Wishing):
    """Asks at the beginning of the step, and at the end of the epoch."""

    on_step_end = TrainerCallback.on_step_end

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        return Wishing.on_step_end(self, args, state, control)

    on_epoch_end = on_step_begin


class Slower(TrainerCallback):
    """Has a learning rate of its own."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        for group in objects["optimizer"].param_groups:
            group["lr"] = 1e-4 * state.global_step


def test_wishes_of_other_events_are_heard_and_a_changed_rate_is_told(tmp_path: Path) -> None:
    """The end of an epoch among them, which has three steps."""
    options: dict[str, Any] = {
        "train": STEPS,
        "data": {"path": str(write_corpus(tmp_path / "short.txt", 400)), "val_size": 0.15},
        "eval": {"every": None, "at_end": False, "keep_best": False},
        "checkpoint": {"every": None, "keep_last": None},
    }
    members = [Sooner(0, "should_save"), Sooner(3, "should_evaluate"), Slower()]
    train(make_config(tmp_path, **options), callbacks=members)
    run = tmp_path / "run"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000001", "step-00000004"]
    evaluated = [row["step"] for row in read_rows(run / "events.jsonl") if row["event"] == "evaluation"]
    assert evaluated == [3, 4], "at the end of the epoch, and in the step after it"
    assert [row["lr"] for row in rows_of(run)] == [0.0, 1e-4, 2e-4, pytest.approx(3e-4)]


def test_transformers_early_stop_lets_a_run_that_gets_better_go_on(tmp_path: Path) -> None:
    """It compares an evaluation with the best one before it, and not with itself."""
    options: dict[str, Any] = {**OPTIONS, "eval": {"every": 1}, "checkpoint": {"every": None}}
    train(make_config(tmp_path, **options), callbacks=[EarlyStoppingCallback(2)])
    assert len(rows_of(tmp_path / "run")) == 4
    state = verify(max((tmp_path / "run/checkpoints").iterdir())).meta["callbacks"]["EarlyStoppingCallback"]
    assert state["attributes"]["early_stopping_patience_counter"] == 0


class Failing(TrainerCallback):
    """Raises in the middle of a step, before its update."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            raise ConnectionError("no server")


def test_a_callback_that_raises_costs_no_step(tmp_path: Path, listened: tuple[Path, Listener]) -> None:
    listener = Listener()
    with pytest.raises(CallbackError) as caught:
        train(make_config(tmp_path, **OPTIONS), callbacks=[Failing(), listener])
    assert "Failing failed in on_pre_optimizer_step (ConnectionError: no server)" in str(caught.value)
    assert f"step 2 is saved in {tmp_path / 'run/checkpoints/step-00000002'}" in str(caught.value)
    assert listener.calls[-1] == "on_train_end"
    train(make_config(tmp_path, **OPTIONS))
    left, right = state_of(tmp_path / "run"), state_of(listened[0] / "run")
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())


def test_a_callback_that_raises_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    class Early(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            raise ValueError("no account")

    with pytest.raises(CallbackError, match=r"Early failed in on_train_begin \(ValueError: no account\); no"):
        train(make_config(tmp_path, **OPTIONS), callbacks=[Early()])
    assert not (tmp_path / "run/checkpoints").exists()


class Counting(TrainerCallback, ExportableState):
    """Keeps a count of its own in the checkpoint."""

    def __init__(self, count: Any = 0) -> None:
        self.count = count
        self.last: list[int] = []

    def state(self) -> dict[str, Any]:
        return {"args": {"count": self.count}, "attributes": {}}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += 1


def test_what_a_callback_keeps_of_itself_goes_on(tmp_path: Path) -> None:
    every: dict[str, Any] = {**OPTIONS, "checkpoint": {"every": 1, "keep_last": None}}
    train(make_config(tmp_path, "first", **every), callbacks=[Counting()])
    part = tmp_path / "first/checkpoints/step-00000003"
    assert verify(part).meta["callbacks"] == {"Counting": {"args": {"count": 3}, "attributes": {}}}
    train(make_config(tmp_path, "second", **every), resume=str(part), callbacks=[Counting()])
    newest = verify(tmp_path / "second/checkpoints/step-00000004")
    assert newest.meta["callbacks"]["Counting"]["args"] == {"count": 4}


def callbacks_of(config: Config, members: list[TrainerCallback]) -> Callbacks:
    return Callbacks(members, config, num_steps=4, steps_per_epoch=2, objects={})


def test_callbacks_of_a_rank_leave_its_threads_and_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate, which makes the arguments' device, would set other threads, and sums other bits."""
    told = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        callbacks_of(make_config(tmp_path), [Counting()])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert {name: os.environ[name] for name in told} == told


def test_a_callback_whose_state_cannot_be_saved_fails_without_the_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    for value in (np.float32(1.0), math.nan):
        called = callbacks_of(config, [Counting(value), Counting(3)])
        assert list(called.saved_state().values()) == [{"args": {"count": 3}, "attributes": {}}]
        assert called.failure is not None
        assert (called.failure.name, called.failure.event) == ("Counting", "state")
    with pytest.raises(CallbackError, match=r"Counting failed in state \(.*\); no step was taken"):
        train(make_config(tmp_path), callbacks=[Counting(math.nan)])
    two = callbacks_of(config, [Counting(1), Counting(2)])
    with pytest.raises(CallbackError, match="Counting failed in from_state"):
        two.restore({"Counting": {}})
    other = callbacks_of(config, [Counting(), Counting()])
    other.restore(two.saved_state())
    assert other.saved_state() == two.saved_state()
    assert [state["args"]["count"] for state in two.saved_state().values()] == [1, 2], "each its own"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensorbord", r"log\.to names tensorbord; transformers knows .*tensorboard"),
        ("wandb", r"log\.to names wandb, whose package is not installed; install it, or leave it out"),
    ],
)
def test_a_tracker_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=words):
        train(make_config(tmp_path, log={"to": [name]}))
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_costs_its_rows_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.integrations.integration_utils import TensorBoardCallback

    log, logged = TensorBoardCallback.on_log, []

    def fails(self: Any, args: Any, state: Any, control: Any, **values: Any) -> Any:
        if state.global_step in (2, 3):
            raise ConnectionError("no server")
        logged.append(state.global_step)
        return log(self, args, state, control, **values)

    monkeypatch.setattr(TensorBoardCallback, "on_log", fails)
    train(make_config(tmp_path, train=STEPS, log={"to": ["tensorboard"], "report": False}))
    assert logged == [1, 4]
    said = [text for text in caplog.messages if "TensorBoardCallback" in text]
    assert said == [
        "the tracker TensorBoardCallback failed in on_log (ConnectionError: no server). The run goes on, and "
        "calls it again",
        "2 calls of TensorBoardCallback have failed: it lacks rows",
    ]
    assert (tmp_path / "run/checkpoints/step-00000004").is_dir()
