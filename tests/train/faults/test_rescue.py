"""An error in a step costs that step: the last whole one is saved, and the run goes on to the same bits."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from megatrain.checkpoint.load import verify
from megatrain.data.loader import PackedLoader
from megatrain.errors import DataError, MegatrainError, OutputError, TornStateError
from megatrain.stream import optimizer
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import EmulatedLanes
from megatrain.train import loop, step
from megatrain.train.evaluate.evaluator import Evaluator
from megatrain.train.faults import rescue
from megatrain.train.loop import train
from megatrain.train.records.json_lines import read_rows
from megatrain.train.run import Run
from megatrain.train.saves.saves import Saves
from tests.stream.execute.test_integrity import FailingKernel
from tests.train.project import make_config
from tests.train.test_loop import rows_of, state_of

FAILS = "the machine has a bad day"


def options(device: str = "cpu", **optim: Any) -> dict[str, Any]:
    return {
        "train": {"steps": 7, "device": device},
        "data": {"val_size": 0.05},
        "eval": {"every": 3, "keep_best": False},
        "optim": optim,
        "checkpoint": {"every": None},
        "log": {"report": False},
    }


class Draws(TrainerCallback, ExportableState):
    """Draws numbers of every generator as a step begins, and keeps how many, as a callback of a user may."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.count += 1
        torch.rand(3), random.random(), np.random.rand()

    def state(self) -> dict[str, Any]:
        return {"args": {"count": self.count}, "attributes": {}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 7 steps with evaluations, and a checkpoint of each step."""
    root = tmp_path_factory.mktemp("whole")
    kept = options() | {"checkpoint": {"every": 1, "keep_last": None}}
    start(make_config(root, **kept))
    return root / "run"


def recorded(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of its run, without its settings and the machine's counters."""
    meta = dict(verify(checkpoint).meta)
    for name in ("config", "drive_written_bytes", "last_good"):
        meta.pop(name)
    return meta


def start(config: Any) -> Path:
    """Train; every generator begins alike, and a run that goes on has those of its checkpoint."""
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    return train(config, callbacks=[Draws()])


class Trap:
    """Raises at one moment of the fifth step, once."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Callable[[], Exception]) -> None:
        self.patch, self.error, self.run, self.sprang = patch, error, None, False
        steps = loop.train_step

        def stepped(run: Run) -> Any:
            self.run = run
            return steps(run)

        patch.setattr(loop, "train_step", stepped)

    def spring(self) -> None:
        run: Any = self.run
        if run is not None and not self.sprang:
            self.sprang = True
            raise self.error()

    def before(self, owner: Any, name: str, *, after: bool = False, step: int = 4) -> None:
        """Spring as a function is called in that step, or when it has done its work."""
        function = getattr(owner, name)

        def trapped(*args: Any, **given: Any) -> Any:
            run: Any = self.run
            is_time = run is not None and run.step == step
            if is_time and not after:
                self.spring()
            found = function(*args, **given)
            if is_time and after:
                self.spring()
            return found

        self.patch.setattr(owner, name, trapped)


def in_loader(trap: Trap) -> None:
    trap.before(PackedLoader, "_micro_batch", after=True)


def in_forward(trap: Trap) -> None:
    forward = torch.nn.functional.silu

    def trapped(*args: Any, **given: Any) -> Any:
        trap.run is None or trap.run.step != 4 or trap.spring()  # type: ignore[func-returns-value]
        return forward(*args, **given)

    trap.patch.setattr(torch.nn.functional, "silu", trapped)


def after_backward(trap: Trap) -> None:
    trap.before(Engine, "forward_backward", after=True)


def before_the_update(trap: Trap) -> None:
    trap.before(Engine, "_check_step")


def after_the_update(trap: Trap) -> None:
    trap.before(step, "StepMetrics", step=5)


def as_it_is_judged(trap: Trap) -> None:
    trap.before(loop, "check_divergence", step=5)


def in_the_evaluation(trap: Trap) -> None:
    trap.before(Evaluator, "evaluate", step=6)


MOMENTS: dict[str, tuple[Callable[[Trap], None], int]] = {
    "loader": (in_loader, 4),
    "forward": (in_forward, 4),
    "backward": (after_backward, 4),
    "before the update": (before_the_update, 4),
    "after the update": (after_the_update, 5),
    "judged": (as_it_is_judged, 5),
    "evaluation": (in_the_evaluation, 6),
}
"""The moments of a step, and the step that is whole then."""


def assert_same_ends(actual: Path, expected: Path, *, lacks: int | None = None) -> None:
    """Assert equal rows, but for one that may lack, and equal states, bit for bit."""
    for name in ("step", "loss", "grad_norm", "lr", "tokens", "targets"):
        rows = [row[name] for row in rows_of(expected) if row["step"] != lacks]
        assert [row[name] for row in rows_of(actual)] == rows, name
    left, right = state_of(actual), state_of(expected)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.sampled(8)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("updates", ["deferred", "serial"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_error_in_a_step_costs_that_step_and_no_other(
    moment: str, updates: str, device: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, **options(device, updates=updates))
    set_trap, saved = MOMENTS[moment]
    with monkeypatch.context() as patch:
        trap = Trap(patch, lambda: DataError(FAILS))
        set_trap(trap)
        with pytest.raises(DataError) as caught:
            start(config)
        assert trap.sprang
    checkpoint = tmp_path / f"run/checkpoints/step-{saved:08d}"
    assert str(caught.value) == (
        f"{FAILS}. Step {saved} is saved in {checkpoint}, and the same command goes on from there"
    )
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]
    known, found = recorded(whole / "checkpoints" / checkpoint.name), recorded(checkpoint)
    if moment == "evaluation":  # it is made again
        del known["evaluation"], found["evaluation"]
    assert found == known
    start(config)
    assert_same_ends(tmp_path / "run", whole, lacks=5 if moment == "after the update" else None)


def fails_once(config: Any, patch: pytest.MonkeyPatch, set_trap: Callable[[Trap], None]) -> str:
    """Train until an error, and return what it says."""
    with patch.context() as inner:
        set_trap(Trap(inner, lambda: DataError(FAILS)))
        with pytest.raises(MegatrainError) as caught:
            start(config)
    return str(caught.value)


def test_updates_that_a_failure_has_left_out_are_taken_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm of the fourth step fails in its lane when that step is counted: no update begins."""

    def in_norm(trap: Trap) -> None:
        norm, calls = optimizer.global_norm, itertools.count(1)

        def trapped(*args: Any) -> Any:
            if next(calls) == 4:
                while trap.run is None or trap.run.step < 4:  # the lane may be ahead of the count
                    time.sleep(0.001)
                trap.spring()
            return norm(*args)

        trap.patch.setattr(optimizer, "global_norm", trapped)

    config = make_config(tmp_path, **options("emulated"))
    said = fails_once(config, monkeypatch, in_norm)
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    assert said == f"{FAILS}. Step 3 is saved in {checkpoint}, and the same command goes on from there"
    assert recorded(checkpoint) == recorded(whole / "checkpoints" / checkpoint.name)
    start(config)
    assert_same_ends(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.parity) for seed in range(1, 60))]
)
def test_any_operation_of_a_lane_may_fail(
    seed: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was issued, begun or done: the state is torn and not saved, or whole and its step's."""
    chance, count = random.Random(seed), 0
    last = chance.randrange(30, 100)
    submit = EmulatedLanes._submit

    def fail() -> None:
        time.sleep(chance.random() / 300)  # the launching thread is ahead meanwhile
        raise DataError(FAILS)

    def failing(lanes: Any, lane: Any, function: Callable[[], object], work: float, found: object) -> Any:
        nonlocal count
        count += 1
        return submit(lanes, lane, fail if count == last else function, work, found)

    streams = {"memory": {"resident_blocks": 0}} if seed % 2 else {}
    config = make_config(tmp_path, **options("emulated") | streams)
    with monkeypatch.context() as patch:
        patch.setattr(EmulatedLanes, "_submit", failing)
        with pytest.raises(MegatrainError) as caught:
            start(config)
    saved = list((tmp_path / "run/checkpoints").glob("*"))
    if isinstance(caught.value, TornStateError):
        assert not saved
    elif saved:
        assert f"is saved in {saved[0]}" in str(caught.value)
        found, known = recorded(saved[0]), recorded(whole / "checkpoints" / saved[0].name)
        assert found | {"evaluation": None} == known | {"evaluation": None}, (
            "one that has failed is made again"
        )
    start(config)
    left, right = state_of(tmp_path / "run"), state_of(whole)
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_checkpoint_that_is_there_is_not_written_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, **options() | {"checkpoint": {"every": 2}})
    with monkeypatch.context() as patch:
        patch.setattr(rescue, "save", lambda *_, **__: pytest.fail("it was written"))
        said = fails_once(config, patch, in_forward)
    assert f"Step 4 is saved in {tmp_path}/run/checkpoints/step-00000004" in said


@pytest.mark.parametrize("every", [3, pytest.param(None, marks=pytest.mark.parity)])
def test_immediate_updates_are_not_saved_and_the_newest_point_is_named(
    every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        tmp_path, **options(updates="immediate", max_grad_norm=None) | {"checkpoint": {"every": every}}
    )
    said = fails_once(config, monkeypatch, in_loader)
    checkpoints = tmp_path / "run/checkpoints"
    point = (
        "the beginning, since nothing was saved before" if every is None else f"{checkpoints}/step-00000003"
    )
    assert said == (
        f"{FAILS}. With optim.updates=immediate nothing is saved: the same command goes on from {point}"
    )
    assert len(list(checkpoints.glob("*"))) == (every is not None)


def test_torn_state_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, **options())
    with monkeypatch.context() as patch:
        FailingKernel(patch).fails_at = 3 * 6 + 2
        with pytest.raises(TornStateError, match="it goes on from the beginning"):
            start(config)
    assert not list((tmp_path / "run/checkpoints").glob("*"))


def test_first_step_that_fails_leaves_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "forward_backward", lambda *_, **__: [].pop())
    with pytest.raises(IndexError):
        start(make_config(tmp_path, **options()))
    assert not list((tmp_path / "run/checkpoints").glob("*"))


def test_unforeseen_error_keeps_its_traceback_and_is_saved_all_the_same(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, **options())
    with monkeypatch.context() as patch:
        trap = Trap(patch, lambda: ZeroDivisionError("by a mistake"))
        in_forward(trap)
        with pytest.raises(ZeroDivisionError, match=r"^by a mistake$"):
            start(config)
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    assert f"step 4 is saved in {checkpoint}, and the same command goes on from there" in caplog.text
    start(config)
    assert_same_ends(tmp_path / "run", whole)


def test_rescue_that_fails_says_why_and_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OutputError("megatrain cannot write x: No space left on device; free some space there")

    config = make_config(tmp_path, **options() | {"checkpoint": {"every": 3}})
    with monkeypatch.context() as patch:
        patch.setattr(rescue, "save", full)
        said = fails_once(config, patch, in_forward)
    assert said == (
        f"{FAILS}. What was trained since could not be saved (megatrain cannot write x: No space left on "
        f"device): the same command goes on from {tmp_path}/run/checkpoints/step-00000003"
    )


@pytest.mark.parity
def test_rescue_keeps_as_many_as_the_settings_say_and_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, **options() | {"checkpoint": {"every": 1, "keep_last": 2}})
    with monkeypatch.context() as patch:
        patch.setattr(Saves, "begin", lambda saves: None)
        fails_once(config, patch, in_loader)
    events = [(row["event"], row["step"]) for row in read_rows(tmp_path / "run/events.jsonl")]
    assert events[-2:] == [("checkpoint", 4), ("error", 4)]
    fails_once(config, monkeypatch, lambda trap: trap.before(loop, "check_divergence", step=6))
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "step-00000005",
        "step-00000006",
    ]
