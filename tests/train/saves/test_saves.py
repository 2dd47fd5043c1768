"""Saves of a run: in the background to the bytes of the blocking ones, and what follows where one fails."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from megatrain import files
from megatrain.checkpoint import format
from megatrain.checkpoint.load import find, verify
from megatrain.checkpoint.saver import Saver
from megatrain.errors import OutputError
from megatrain.stream.execute.guard import StateGuard
from megatrain.train import loop
from megatrain.train.evaluate.best_tracker import BestTracker
from megatrain.train.loop import train
from megatrain.train.planning.save_interval import SaveInterval
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.json_lines import read_rows
from tests.disks import FailingWrites, SmallDisk, WatchedWrites
from tests.train.project import make_config, write_corpus, write_model_with_experts
from tests.train.test_adapters import config_of, write_base

EVERY = {"every": 2, "keep_last": None}


def contents(run: Path) -> dict[str, bytes]:
    """Return the bytes of all checkpoints of a run, without what differs in its settings."""
    return {
        str(file.relative_to(run)): file.read_bytes()
        for path in find(run / "checkpoints")
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != format.MANIFEST_NAME
    }


class Slow(files.FileCalls):
    """A disk on which each write takes some time."""

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        time.sleep(0.003)
        return super().write_at(descriptor, data, offset)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "CHUNK_BYTES", 4096)


def settings(name: str, tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a kind of run."""
    drives = {"tiers": {"ram": 540_000, "nvme": [str(tmp_path / "drive")]}, "activations": "recompute"}
    emulated = {"device": "emulated", "precision": "bf16"}
    kinds: dict[str, dict[str, Any]] = {
        "bf16": {"train": {"precision": "bf16"}},
        "fp32": {"train": {"precision": "fp32"}},
        "only": {"train": {"precision": "bf16", "only": ["*.layers.1.*"]}},
        "immediate": {"optim": {"updates": "immediate", "max_grad_norm": None}},
        "int8": {"optim": {"state": "int8"}, "train": {"precision": "bf16"}},
        "emulated": {"train": emulated},
        "resident": {"train": emulated, "memory": {"resident_blocks": 1}},
        "drives": {"train": emulated, "memory": drives},
        "alone": {"train": emulated, "memory": {"resident_blocks": 2, "mirror_resident": False}},
        "fragments": {"train": emulated, "memory": {"fragments": True}},
        "evaluated": {"train": emulated, "eval": {"every": 1, "prompts": ["one small"], "max_new_tokens": 2}},
        "serial": {"train": emulated, "optim": {"updates": "serial"}},
        "chunks": {"train": emulated, "memory": {"expert_chunks": 2}},
    }
    return kinds[name]


KINDS = (
    "bf16",
    "fp32",
    "only",
    "immediate",
    "int8",
    "emulated",
    "resident",
    "drives",
    "alone",
    "fragments",
    "evaluated",
    "serial",
    "chunks",
)


def run_of(tmp_path: Path, name: str, kind: str, **checkpoint: Any) -> Path:
    """Train 6 steps, with a checkpoint at every second one."""
    given = settings(kind, tmp_path / name)
    given["train"] = {"steps": 6, **given.get("train", {})}
    (tmp_path / name).mkdir(exist_ok=True)
    if kind == "chunks" and not (tmp_path / "model").exists():
        write_model_with_experts(tmp_path / "model")
        write_corpus(tmp_path / "corpus.txt")
    train(make_config(tmp_path, f"{name}/run", checkpoint={**EVERY, **checkpoint}, **given))
    return tmp_path / name / "run"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_those_of_blocking_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    plain = run_of(tmp_path, "plain", kind, background=False)
    monkeypatch.setattr(files, "system", Slow())
    own = run_of(tmp_path, "own", kind)
    found = contents(own)
    assert len(found) > 15
    assert found == contents(plain)
    for one, other in zip(find(own / "checkpoints"), find(plain / "checkpoints"), strict=True):
        mine, theirs = (verify(each).meta for each in (one, other))
        differs = {key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)}
        assert differs <= {"config", "drive_written_bytes"}


def test_adapters_are_those_of_blocking_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_base(tmp_path)
    given: dict[str, Any] = {"train": {"steps": 4}, "optim": {"warmup_steps": 0}}
    train(config_of(root, "waits", checkpoint={**EVERY, "background": False}, **given))
    monkeypatch.setattr(files, "system", Slow())
    train(config_of(root, "own", checkpoint=EVERY, **given))
    found = contents(tmp_path / "own")
    assert any("adapter_model.safetensors" in name for name in found)
    assert found == contents(tmp_path / "waits")


def test_without_the_guard_the_checkpoint_would_be_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_of(tmp_path, "plain", "bf16", background=False)
    monkeypatch.setattr(files, "system", Slow())
    monkeypatch.setattr(StateGuard, "hold", lambda self, wait: None)
    assert contents(run_of(tmp_path, "own", "bf16", buffer=2**26)) != contents(plain)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 ends before anything of step 2 is on the disk; the row of step 2 says so."""
    held, steps = threading.Event(), []

    class Held(files.FileCalls):
        def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
            assert held.wait(120)
            return super().write_at(descriptor, data, offset)

    step_of = loop.train_step

    def stepped(run: Any) -> Any:
        row = step_of(run)
        steps.append(run.step)
        if run.step == 3:
            assert [path.name for path in find(tmp_path / "run/checkpoints")] == []
            held.set()
        return row

    monkeypatch.setattr(files, "system", Held())
    monkeypatch.setattr(loop, "train_step", stepped)
    train(make_config(tmp_path, checkpoint=EVERY, train={"steps": 6}))
    rows = [row for row in read_rows(tmp_path / "run/events.jsonl") if row["event"] == "checkpoint"]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert all(row["seconds"] >= row["waited_s"] >= 0 for row in rows)


@pytest.mark.parametrize("background", [True, False])
def test_a_run_goes_on_after_a_save_that_found_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    class Full(WatchedWrites):
        is_full = False

        def before_write(self, path: str, num_bytes: int) -> None:
            if self.is_full and "checkpoints" in path:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    whole = run_of(tmp_path, "whole", "bf16")
    full, step_of = Full(), loop.train_step

    def stepped(run: Any) -> Any:
        row = step_of(run)
        full.is_full = run.step == 4
        return row

    monkeypatch.setattr(files, "system", full)
    monkeypatch.setattr(loop, "train_step", stepped)
    if background:  # it is begun at step 4, and must not end before step 5 makes room
        monkeypatch.setattr(Saver, "begin", _and_wait(Saver.begin))
    own = run_of(tmp_path, "own", "bf16", background=background)
    assert [path.name for path in find(own / "checkpoints")] == ["step-00000006", "step-00000002"]
    assert contents(own) == {
        name: data for name, data in contents(whole).items() if "step-00000004" not in name
    }
    (row,) = [row for row in read_rows(own / "events.jsonl") if row["event"] == "unsaved"]
    assert row["step"] == 4
    assert "No space left" in row["reason"]
    assert "step 4 is not saved" in caplog.text


def _and_wait(begin: Any) -> Any:
    def waits(saver: Saver, *arguments: Any) -> None:
        begin(saver, *arguments)
        assert saver.ends_within(20)

    return waits


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_with_room_for_two_checkpoints_of_three_that_are_kept_has_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Every save that finds no room takes the oldest, so the next one has room."""
    whole = run_of(tmp_path, "whole", "bf16")
    each = sum(len(data) for name, data in contents(whole).items() if "step-00000002" in name)
    monkeypatch.setattr(files, "system", SmallDisk(tmp_path / "own/run/checkpoints", int(2.9 * each)))
    own = run_of(tmp_path, "own", "bf16", every=1, keep_last=2, background=background)
    found = [path.name for path in find(own / "checkpoints")]
    assert found[0] == "step-00000006"
    assert len(found) == 2
    unsaved = [row for row in read_rows(own / "events.jsonl") if row["event"] == "unsaved"]
    assert {row["step"] for row in unsaved[:2]} == {3, 5}
    assert "step-00000001 went before its time" in unsaved[0]["reason"]


def test_the_last_save_finds_room_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_of(tmp_path, "whole", "bf16")
    each = sum(len(data) for name, data in contents(whole).items() if "step-00000002" in name)
    monkeypatch.setattr(files, "system", SmallDisk(tmp_path / "own/run/checkpoints", int(2.9 * each)))
    own = run_of(tmp_path, "own", "bf16", keep_last=2, background=False)
    assert [path.name for path in find(own / "checkpoints")] == ["step-00000006", "step-00000004"]
    name = "checkpoints/step-00000006/state/block-00000.safetensors"
    assert (own / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("background", [True, False])
def test_best_checkpoint_stays_if_the_next_best_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    take = BestTracker.take

    def taken(tracker: BestTracker, step: int, loss: float, name: str, *, min_delta: float) -> bool:
        return take(tracker, step, {2: 2.0, 4: 1.0}.get(step, 3.0), name, min_delta=min_delta)

    monkeypatch.setattr(BestTracker, "take", taken)
    monkeypatch.setattr(files, "system", FailingWrites("tmp-step-00000004", errno.EIO))
    config = make_config(
        tmp_path,
        train={"steps": 8},
        data={"val_size": 0.05},
        eval={"every": 2, "keep_best": True, "load_best": True},
        checkpoint={"every": 2, "keep_last": 1, "background": background},
    )
    train(config)  # its end loads the best one
    run = tmp_path / "run"
    assert [path.name for path in find(run / "checkpoints")] == ["step-00000008", "step-00000002"]
    assert verify(run / "checkpoints/step-00000008").meta["evaluation"]["best_step"] == 2
    weights = [
        (place / "model.safetensors").read_bytes() for place in (run / "hf", *find(run / "checkpoints"))
    ]
    assert weights[0] == weights[2] != weights[1]


def test_a_directory_that_cannot_be_looked_at_costs_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    is_in_place = RunDirectory.is_in_place

    def looked(directory: RunDirectory) -> bool:
        looks.append(directory.path)
        if len(looks) == 1:
            raise OutputError(f"megatrain cannot look at {directory.path}: Stale file handle")
        return is_in_place(directory)

    monkeypatch.setattr(RunDirectory, "is_in_place", looked)
    own = run_of(tmp_path, "own", "bf16")
    assert [path.name for path in find(own / "checkpoints")] == ["step-00000006", "step-00000004"]
    (row,) = [row for row in read_rows(own / "events.jsonl") if row["event"] == "unsaved"]
    assert (row["step"], "Stale file handle" in row["reason"]) == (2, True)


def test_the_last_save_must_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "system", FailingWrites("checkpoints", errno.ENOSPC))
    with pytest.raises(OutputError, match="No space"):
        train(make_config(tmp_path, checkpoint={"every": None}, train={"steps": 4}))


def test_an_old_checkpoint_that_stays_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, **_: Any) -> None:
        raise OutputError("megatrain cannot remove it")

    monkeypatch.setattr("megatrain.checkpoint.save.retain", refuse)
    own = run_of(tmp_path, "own", "bf16")
    assert [path.name[-1] for path in find(own / "checkpoints")] == ["6", "4", "2"]
    assert "is saved and whole, but an older checkpoint is in the way" in caplog.text
    assert not [row for row in read_rows(own / "events.jsonl") if row["event"] == "unsaved"]


def test_an_interrupt_gives_up_what_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(files.FileCalls):
        def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
            time.sleep(0.3)
            return super().write_at(descriptor, data, offset)

    step_of = loop.train_step

    def stepped(run: Any) -> Any:
        if run.step == 2:
            raise KeyboardInterrupt
        return step_of(run)

    with monkeypatch.context() as patch:
        patch.setattr(files, "system", Stuck())
        patch.setattr(loop, "train_step", stepped)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            train(make_config(tmp_path, checkpoint={**EVERY, "buffer": 2**26}))
        assert time.monotonic() - began < 20
    assert find(tmp_path / "run/checkpoints") == []
    whole = run_of(tmp_path, "whole", "bf16")
    train(make_config(tmp_path, checkpoint=EVERY, train={"steps": 6, "precision": "bf16"}))
    assert contents(tmp_path / "run") == contents(whole)


class Held(files.FileCalls):
    """A disk on which no write of a large file ends before it is let go of."""

    def __init__(self) -> None:
        self.has_begun, self.is_free = threading.Event(), threading.Event()

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.has_begun.set()
        assert self.is_free.wait(120)
        return super().write_at(descriptor, data, offset)


def threads_that_save() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("megatrain-save")]


def test_a_run_that_ends_before_its_first_step_leaves_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OutputError("megatrain cannot write metrics.jsonl")

    monkeypatch.setattr(loop, "MetricsLog", refuse)
    before = threads_that_save()
    with pytest.raises(OutputError, match="cannot write metrics"):
        train(make_config(tmp_path, train={"steps": 4}))
    assert threads_that_save() == before


@pytest.mark.usefixtures("hears_ctrl_c")
def test_a_second_ctrl_c_while_the_last_save_is_waited_for_ends_the_run_and_keeps_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Held()

    def interrupt() -> None:
        assert disk.has_begun.wait(120)
        for _ in range(2):
            time.sleep(0.4)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        disk.is_free.set()

    config = make_config(tmp_path, checkpoint={"every": 4, "buffer": 2**26}, train={"steps": 4})
    monkeypatch.setattr(files, "system", disk)
    impatient = threading.Thread(target=interrupt)
    impatient.start()
    with pytest.raises(KeyboardInterrupt):
        train(config)
    impatient.join()
    (path,) = find(tmp_path / "run/checkpoints")
    assert verify(path).step == 4
    assert threads_that_save() == []


def test_a_save_that_fails_does_not_hide_what_has_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither is anything left of the save: no thread, and nothing that changes wait for."""
    held, step_of, result_of = [], loop.train_step, Saver.result

    def stepped(run: Any) -> Any:
        if run.step == 2:
            held.append(run.engine.arrangement.guard)
            raise ZeroDivisionError("the step")
        return step_of(run)

    def refuse(saver: Saver) -> Path:
        result_of(saver)
        raise RuntimeError("the save")

    monkeypatch.setattr(loop, "train_step", stepped)
    monkeypatch.setattr(Saver, "result", refuse)
    with pytest.raises(ZeroDivisionError, match="the step"):
        train(make_config(tmp_path, checkpoint=EVERY, train={"steps": 6}))
    assert "failed too: the save" in caplog.text
    assert threads_that_save() == []
    assert held[0]._wait is None


def test_a_run_that_waits_for_its_last_save_knows_what_that_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `checkpoint.every=auto` would let a slow disk stop the run for as long as it liked."""
    disk, costs = Held(), []
    monkeypatch.setattr(SaveInterval, "took", lambda self, cost_s: costs.append(cost_s))
    monkeypatch.setattr(files, "system", disk)
    step_of = loop.train_step

    def stepped(run: Any) -> Any:
        row = step_of(run)
        if run.step == 4:
            threading.Timer(0.5, disk.is_free.set).start()
        return row

    monkeypatch.setattr(loop, "train_step", stepped)
    train(make_config(tmp_path, checkpoint={**EVERY, "buffer": 2**26}, train={"steps": 4}))
    assert len(costs) == 2
    assert costs[0] > 0.4
    rows = [row for row in read_rows(tmp_path / "run/events.jsonl") if row["event"] == "checkpoint"]
    assert [row["waited_s"] for row in rows] == [round(cost, 3) for cost in costs]


def test_the_tokenizer_is_written_by_the_thread_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation changes how it cuts and pads, and what it says of itself is in the checkpoint."""
    threads, save_of = [], PreTrainedTokenizerBase.save_pretrained

    def save(self: Any, *given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return save_of(self, *given, **named)

    config = make_config(tmp_path, checkpoint=EVERY, train={"steps": 4})
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", save)
    train(config)
    assert threads
    assert set(threads) == {threading.main_thread()}


@pytest.mark.parametrize("kind", ["bf16", "resident", "alone"])
def test_what_happens_between_steps_changes_no_byte_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The engine goes on in another way, and a caller writes to parameters, as `engine.sync` allows."""
    step_of = loop.train_step

    def stepped(run: Any) -> Any:
        row = step_of(run)
        choice = run.engine.choice
        layers = choice.resident_layers if kind == "alone" else run.step % 3
        run.engine.reconfigure(
            replace(choice, num_slots=2 + run.step % 2, resident_layers=0 if kind == "bf16" else layers)
        )
        run.engine.sync()
        with torch.no_grad():
            for parameter in run.engine.model.parameters():
                parameter.mul_(0.75)
        run.engine.weights_changed()
        return row

    monkeypatch.setattr(loop, "train_step", stepped)
    plain = run_of(tmp_path, "plain", kind, background=False)
    monkeypatch.setattr(files, "system", Slow())
    assert contents(run_of(tmp_path, "own", kind)) == contents(plain)


def test_a_step_that_fails_while_a_checkpoint_is_written_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 2 is finished, and then step 3, the last whole one, is saved."""
    disk, step_of = Held(), loop.train_step
    whole = contents(run_of(tmp_path, "whole", "bf16", every=1))

    def stepped(run: Any) -> Any:
        if run.step == 3:
            threading.Timer(0.3, disk.is_free.set).start()
            raise ZeroDivisionError("the step")
        return step_of(run)

    monkeypatch.setattr(files, "system", disk)
    monkeypatch.setattr(loop, "train_step", stepped)
    with pytest.raises(ZeroDivisionError):
        run_of(tmp_path, "own", "bf16", buffer=2**26)
    found = contents(tmp_path / "own/run")
    assert {Path(name).parts[1] for name in found} == {"step-00000002", "step-00000003"}
    assert found == {name: whole[name] for name in found}
