"""An error that ends a trainer's training costs the step that has failed, and no other."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from megatrain.stream.optimizer import StreamedOptimizer
from tests.hf.setups import assert_same_weights, logged, tiny
from tests.hf.test_trainer import make

SETTINGS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 100,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "include_num_input_tokens_seen": "all",
}
"""Six steps, none of which saves."""


class Trap(TrainerCallback):
    """Draws numbers of every generator as a step begins, and raises at a moment of one step."""

    def __init__(self, moment: str = "", step: int = 4) -> None:
        self.moment, self.step = moment, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.rand(3), random.random(), np.random.rand()
        if state.global_step + 1 == self.step:
            self._raise("on_step_begin")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self.step:
            self._raise("on_optimizer_step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self._raise("on_step_end")

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self._raise("on_log")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self._raise("on_evaluate")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._raise("on_train_end")

    def _raise(self, moment: str) -> None:
        if moment == self.moment:
            raise RuntimeError("a wire is loose")


def start(directory: Path, moment: str = "", *, fields: Any = None, seed: int = 0, **changes: Any) -> Any:
    """Make a trainer; every generator begins alike, and one that resumes has those of its checkpoint."""
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    settings = {**SETTINGS, **changes}
    return make(directory, model=tiny(seed=seed), callbacks=[Trap(moment)], fields=fields, **settings)


def fail(trainer: Any, caplog: pytest.LogCaptureFixture) -> str:
    """Train until it fails, and return what is said of it."""
    with pytest.raises(RuntimeError, match=r"^a wire is loose$"):
        trainer.train()
    (said,) = [text for text in caplog.messages if text.startswith("an error ends the training")]
    return said


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("moment", "saved"),
    [
        ("forward", 3),
        ("on_step_begin", 3),
        ("on_step_end", 4),
        ("on_log", 4),
        ("on_evaluate", 4),
        ("evaluation", 4),
    ],
)
def test_an_error_costs_its_step_and_no_other(
    moment: str,
    saved: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = start(tmp_path / "whole", save_steps=1)
    whole.train()
    failing = start(tmp_path / "run", moment)
    if moment == "forward":
        compute = type(failing).compute_loss

        def computed(self: Any, *args: Any, **given: Any) -> Any:
            if self is failing and self.model.training and self.state.global_step == 3:
                torch.rand(5)
                raise RuntimeError("a wire is loose")
            return compute(self, *args, **given)

        monkeypatch.setattr(type(failing), "compute_loss", computed)
    if moment == "evaluation":
        predict = type(failing).prediction_step

        def predicted(self: Any, *args: Any, **given: Any) -> Any:
            if self is failing and self.state.global_step == 4:
                torch.rand(5)
                raise RuntimeError("a wire is loose")
            return predict(self, *args, **given)

        monkeypatch.setattr(type(failing), "prediction_step", predicted)
    said = fail(failing, caplog)
    monkeypatch.undo()
    path = tmp_path / f"run/checkpoint-{saved}"
    assert said == (
        f"an error ends the training (a wire is loose): step {saved} is saved in {path}; "
        "trainer.train(resume_from_checkpoint=True) goes on from there"
    )
    assert [each.name for each in (tmp_path / "run").iterdir()] == [path.name]
    if saved == 3:  # after it nothing of what the failed step has drawn is left; an evaluation draws, too
        files = [tmp_path / f"{name}/checkpoint-3/rng_state.pth" for name in ("run", "whole")]
        ours, theirs = (torch.load(file, weights_only=False) for file in files)
        assert ours["python"] == theirs["python"]
        assert torch.equal(ours["cpu"], theirs["cpu"])
        assert all(map(np.array_equal, ours["numpy"], theirs["numpy"]))
    resumed = start(tmp_path / "run", seed=9)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == 6
    assert_same_weights(dict(resumed.engine.named_masters()), dict(whole.engine.named_masters()))
    assert resumed._streamed.steps == whole._streamed.steps
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen > 0
    assert resumed.state.total_flos == whole.state.total_flos > 0
    trains = [[each for each in logged(trainer) if "loss" in each] for trainer in (resumed, whole)]
    lost = moment == "on_step_end"  # its row was not logged yet
    assert [each["loss"] for each in trains[0]] == [
        each["loss"] for number, each in enumerate(trains[1]) if not (lost and number == 3)
    ]


def test_what_is_saved_already_is_not_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(tmp_path, "on_step_begin", save_steps=3)
    saves: list[int] = []
    save = type(trainer)._save_checkpoint

    def saved(self: Any, *args: Any, **given: Any) -> None:
        saves.append(self.state.global_step)
        save(self, *args, **given)

    monkeypatch.setattr(type(trainer), "_save_checkpoint", saved)
    assert f"step 3 is saved in {tmp_path / 'checkpoint-3'}" in fail(trainer, caplog)
    assert saves == [3]


@pytest.mark.parametrize(
    ("moment", "fields", "why"),
    [
        ("on_optimizer_step", {}, "what the engine holds is not the step that the trainer is at"),
        ("on_step_begin", {"updates": "immediate"}, "with updates=immediate nothing is saved"),
    ],
)
def test_what_is_no_whole_step_is_not_saved(
    moment: str, fields: Any, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(tmp_path, moment, fields=fields, save_steps=2, max_grad_norm=0.0)
    said = fail(trainer, caplog)
    assert said.endswith(f"(a wire is loose): {why}; the newest checkpoint is {tmp_path / 'checkpoint-2'}")
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_trainer_that_saves_nothing_saves_nothing_then(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^a wire is loose$"):
        start(tmp_path, "on_step_begin", save_strategy="no").train()
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_too_leaves_nothing_that_a_resume_would_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(tmp_path, "on_step_begin")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(trainer), "_save_rng_state", full)
    said = fail(trainer, caplog)
    why = "what was trained since could not be saved (OSError: [Errno 28] No space left on device)"
    assert said.endswith(f"{why}; there is no checkpoint")
    assert not list(tmp_path.iterdir())


def test_a_save_that_failed_and_fails_again_is_not_named_as_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(tmp_path, save_steps=2)
    write = type(trainer)._save_rng_state

    def full(self: Any, output_dir: str) -> None:
        if self.state.global_step == 4:
            raise RuntimeError("a wire is loose")
        write(self, output_dir)

    monkeypatch.setattr(type(trainer), "_save_rng_state", full)
    said = fail(trainer, caplog)
    why = "what was trained since could not be saved (RuntimeError: a wire is loose)"
    assert said.endswith(f"{why}; the newest checkpoint is {tmp_path / 'checkpoint-2'}")
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-2"]
    assert f"{tmp_path / 'checkpoint-4'} was not written to its end, and is removed" in caplog.messages


@pytest.mark.parametrize("moment", ["_save_rng_state", "training_step"])
def test_ctrl_c_saves_nothing_and_leaves_no_torn_checkpoint(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(tmp_path, save_steps=2)
    function = getattr(type(trainer), moment)

    def interrupted(self: Any, *args: Any, **given: Any) -> Any:
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        return function(self, *args, **given)

    monkeypatch.setattr(type(trainer), moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    whole = {"checkpoint-2"} | ({"checkpoint-4"} if moment == "training_step" else set())
    assert {each.name for each in tmp_path.iterdir()} == whole


def test_a_trainer_that_saves_models_alone_says_that_nothing_goes_on_from_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = fail(start(tmp_path, "on_step_begin", save_only_model=True), caplog)
    path = tmp_path / "checkpoint-3"
    assert said.endswith(f"the model of step 3 is saved in {path}, and nothing else (save_only_model)")
    assert not (path / "state").exists()
    assert (path / "model.safetensors").exists()


BEST: dict[str, Any] = {"save_steps": 2, "metric_for_best_model": "loss"}
"""With it step 2 is the best one: what is trained after that does worse on other rows."""


def test_the_best_model_is_not_saved_as_that_of_the_last_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {**BEST, "save_strategy": "best", "load_best_model_at_end": True}
    trainer = start(tmp_path, "on_train_end", **changes)
    with pytest.raises(RuntimeError, match=r"^a wire is loose$"):
        trainer.train()
    assert trainer.state.best_global_step == 2
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-2"]
    assert not [text for text in caplog.messages if text.startswith("an error ends the training")]


def test_a_last_step_that_the_limit_has_removed_is_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(tmp_path, "on_train_end", **BEST, save_total_limit=1)
    said = fail(trainer, caplog)
    assert trainer.state.best_global_step == 2
    assert f"step 6 is saved in {tmp_path / 'checkpoint-6'}" in said
    assert {each.name for each in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-6"}


def test_what_is_saved_after_an_error_is_not_pushed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(tmp_path, "on_step_begin")
    pushed: list[str] = []
    monkeypatch.setattr(type(trainer), "_push_from_checkpoint", lambda _, path: pushed.append(path))
    trainer.args.push_to_hub = True
    assert "step 3 is saved in" in fail(trainer, caplog)
    assert pushed == []
    trainer._save_checkpoint(trainer.model, trial=None)
    assert pushed == [str(tmp_path / "checkpoint-3")]


class Counter(TrainerCallback, ExportableState):
    """Counts the steps that begin."""

    count = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def test_what_callbacks_have_counted_in_the_failed_step_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(tmp_path, "on_step_begin")
    trainer.callback_handler.callbacks.insert(0, counter := Counter())
    fail(trainer, caplog)
    assert counter.count == 4
    saved = json.loads((tmp_path / "checkpoint-3/trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["Counter"]["attributes"] == {"count": 3}
    assert counter.state()["attributes"] == {"count": 4}


def test_a_torn_state_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(tmp_path, save_steps=2)
    step = StreamedOptimizer.step

    def torn(self: Any, *args: Any) -> Any:
        if trainer.state.global_step == 3:
            trainer.engine.arrangement.integrity.condemn(RuntimeError("a wire is loose"))
            raise RuntimeError("a wire is loose")
        return step(self, *args)

    monkeypatch.setattr(StreamedOptimizer, "step", torn)
    said = fail(trainer, caplog)
    assert "what was trained since could not be saved (" in said
    assert said.endswith(f"the newest checkpoint is {tmp_path / 'checkpoint-2'}")
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-2"]
