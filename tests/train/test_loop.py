"""Whole runs: resume, signals, damage, and what is left in the run directory."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.checkpoint.load import verify
from megatrain.config import Config
from megatrain.errors import CheckpointError, DivergedError, OutputError
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from megatrain.train import loop
from megatrain.train.loop import train
from megatrain.train.outputs.export import export_run
from megatrain.train.outputs.sample import sample
from megatrain.train.records.json_lines import read_rows
from megatrain.train.records.metrics import StepMetrics
from megatrain.train.resume.changes import changed_settings
from megatrain.train.run import Run
from megatrain.train.shutdown import stop_flag
from tests.train.project import make_config
from tests.train.tensors import tensors_in


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def state_of(run: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of the newest checkpoint, and of the final model."""
    newest = max((run / "checkpoints").glob("step-*"))
    return {
        f"{label} {place}": tensor
        for label, root in (("checkpoint", newest), ("hf", run / "hf"))
        for place, tensor in tensors_in(root).items()
    }


def assert_same_runs(actual: Path, expected: Path) -> None:
    """Assert equal losses at every step, and equal weights, moments and remainders, bit for bit."""
    for name in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in rows_of(actual)] == [row[name] for row in rows_of(expected)], name
    left, right = state_of(actual), state_of(expected)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 12 steps, dropout on."""
    root = tmp_path_factory.mktemp("whole")
    train(make_config(root))
    return root


def test_run_directory_holds_what_is_documented(whole: Path) -> None:
    run = whole / "run"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "env.json",
        "events.jsonl",
        "hf",
        "metrics.jsonl",
        "plan.json",
        "report.html",
    ]
    rows = rows_of(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s"} <= rows[0].keys()
    assert {"mfu", "bound", "over_bound", "fetch_bytes", "offload_bytes", "waits"} <= rows[0].keys()
    assert {"swap_bytes", "drive_written_bytes"} <= rows[0].keys(), "what this machine tells"
    assert not {"power_w", "ecc_errors"} & rows[0].keys(), "what it does not"
    assert rows[-1]["tokens"] == 12 * 4 * 32
    assert rows[-1]["targets"] == 12 * 4 * 31, "the first token of a sequence follows nothing"
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[0]["lr"] == 0.0
    assert rows[3]["lr"] == 1e-2
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "step-00000008",
        "step-00000012",
    ]
    checkpoint = AutoModelForCausalLM.from_pretrained(run / "checkpoints/step-00000012")
    final = AutoModelForCausalLM.from_pretrained(run / "hf")
    for (name, left), (_, right) in zip(checkpoint.named_parameters(), final.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def test_wished_power_cap_is_answered_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(make_config(tmp_path, train={"steps": 1}, optim={"warmup_steps": 0}, hardware={"power_cap": 300.0}))
    advice = [message for message in caplog.messages if message.startswith("hardware.")]
    assert advice == ["hardware.power_cap is 300 W, but the device's limit is not known; nothing is changed"]
    assert len(rows_of(tmp_path / "run")) == 1


def test_finished_run_is_left_alone(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = {path: path.stat().st_mtime_ns for path in (whole / "run").rglob("*")}
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(whole))
    assert "finished" in caplog.text
    assert "differ" not in caplog.text
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(whole, optim={"lr": 0.5}))
    assert "optim.lr 0.01 -> 0.5" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in (whole / "run").rglob("*")} == before


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", ["stale", "missing weights", "flipped bit", "no tokenizer"])
def test_export_that_is_not_the_last_model_is_written_anew(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Such as the model of a shorter run, while the longer one was killed before its export."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    model = tmp_path / "run/hf"
    before = {path.name: path.read_bytes() for path in model.iterdir() if path.name != "README.md"}
    if damage == "stale":
        shutil.copy(tmp_path / "run/checkpoints/step-00000008/model.safetensors", model)
    elif damage == "missing weights":
        (model / "model.safetensors").unlink()
    elif damage == "flipped bit":
        raw = bytearray(before["model.safetensors"])
        raw[-9] ^= 1
        (model / "model.safetensors").write_bytes(raw)
    else:
        (model / "tokenizer.json").unlink()
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path))
    assert f"{model} is not the model of step 12; it is written anew" in caplog.messages
    assert "nothing to do" not in caplog.text
    after = {path.name: path.read_bytes() for path in model.iterdir() if path.name != "README.md"}
    assert after == before
    (model / "README.md").write_text("mine")  # the user's own file beside it changes nothing
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path))
    assert "nothing to do" in caplog.text
    assert (model / "README.md").read_text() == "mine"


def test_run_that_ends_where_a_foreign_checkpoint_begins_has_one_of_its_own(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without, the run would not be known as finished, and begin again from the first step."""
    newest = max((whole / "run/checkpoints").iterdir())
    train(make_config(tmp_path), resume=str(newest))
    left, right = state_of(tmp_path / "run"), state_of(whole / "run")
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path))
    assert "is finished (12 steps)" in caplog.text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("precision", "stops"),
    [
        ("fp32", (3,)),
        ("bf16", (7,)),
        *(pytest.param(*case, marks=pytest.mark.parity) for case in (("fp32", (11,)), ("bf16", (1,)))),
    ],
)
def test_resume_equals_uninterrupted_run(tmp_path: Path, precision: str, stops: tuple[int, ...]) -> None:
    settings = {"precision": precision}
    train(make_config(tmp_path, "whole", train=settings))
    train(make_config(tmp_path, "parts", train=settings, checkpoint={"every": 1, "keep_last": None}))
    for stop in stops:
        part = tmp_path / "parts/checkpoints" / f"step-{stop:08d}"
        train(make_config(tmp_path, f"resumed-{stop}", train=settings), resume=str(part))
        final = max((tmp_path / f"resumed-{stop}/checkpoints").iterdir())
        assert final.name == "step-00000012"
        left, right = state_of(tmp_path / f"resumed-{stop}"), state_of(tmp_path / "whole")
        for name, tensor in right.items():
            assert torch.equal(left[name], tensor), (stop, name)


def test_resume_with_other_settings_and_updates_in_the_background(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = EmulatedLanes(EmulatedMachine(host_bytes_per_s=2e7))  # a step ends long before its updates
    first = {"fragments": True, "activations": "drop_boundary", "lockstep": 2}
    with monkeypatch.context() as patch:
        patch.setattr("megatrain.stream.attach.attach.make_lanes", lambda *_: lanes)
        train(make_config(tmp_path, memory=first, checkpoint={"every": 5, "keep_last": None}))
    part = tmp_path / "run/checkpoints/step-00000005"
    second = {"resident_blocks": 1, "activations": "offload", "boundaries": "host"}
    train(make_config(tmp_path, "resumed", memory=second), resume=str(part))
    expected = {row["step"]: row["loss"] for row in rows_of(whole / "run")}
    assert {row["step"]: row["loss"] for row in rows_of(tmp_path / "run")} == expected
    for row in rows_of(tmp_path / "resumed"):
        assert row["loss"] == expected[row["step"]]


@pytest.fixture
def _hangs_up() -> Iterator[None]:
    """Let SIGHUP be what it is in a terminal, though whoever runs the tests has it ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("_hangs_up")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signal_finishes_the_step_saves_and_exits_75(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    steps = loop.train_step

    def signalled(run: Any) -> Any:
        if run.step == 5:
            handler = signal.getsignal(number)
            threading.Thread(target=lambda: os.kill(os.getpid(), number)).start()
            while signal.getsignal(number) is handler:  # which puts the one before back
                time.sleep(1e-3)
        return steps(run)

    monkeypatch.setattr(loop, "train_step", signalled)
    with pytest.raises(SystemExit) as stopped:
        train(make_config(tmp_path))
    assert stopped.value.code == 75
    assert (tmp_path / "run/checkpoints/step-00000006").is_dir()
    assert not (tmp_path / "run/hf").exists()
    monkeypatch.undo()
    train(make_config(tmp_path))
    assert_same_runs(tmp_path / "run", whole / "run")


def test_a_run_that_is_to_stop_leaves_its_evaluation_to_the_process_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the last one, which no process would make up for."""
    steps, signalled_in = loop.train_step, [3]

    def signalled(run: Any) -> Any:
        if run.step + 1 in signalled_in:
            handler = signal.getsignal(signal.SIGTERM)
            threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            while signal.getsignal(signal.SIGTERM) is handler:
                time.sleep(1e-3)
        return steps(run)

    def evaluations(name: str) -> list[tuple[int, float]]:
        rows = read_rows(tmp_path / name / "events.jsonl")
        return [(row["step"], row["loss"]) for row in rows if row["event"] == "evaluation"]

    def config(name: str) -> Config:
        return make_config(tmp_path, name, train={"steps": 6}, data={"val_size": 0.05}, eval={"every": 3})

    monkeypatch.setattr(loop, "train_step", signalled)
    with pytest.raises(SystemExit):
        train(config("run"))
    assert evaluations("run") == []
    signalled_in[:] = [6]
    train(config("run"))
    monkeypatch.undo()
    train(config("whole"))
    assert [step for step, _ in evaluations("run")] == [3, 6]
    assert evaluations("run") == evaluations("whole")
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


def test_a_closed_terminal_stops_a_run_once_and_not_under_nohup() -> None:
    asked: list[bool] = []
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with stop_flag() as stop:
                for _ in range(2):  # the kernel and the shell both say it
                    os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is handler
        finally:
            signal.signal(signal.SIGHUP, before)
        asked.append(stop.is_set())
    assert asked == [True, False]


def test_a_scheduler_s_warning_stops_a_run_however_often_it_comes() -> None:
    with stop_flag() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    before = signal.signal(signal.SIGUSR1, lambda *_: None)  # of whoever uses it otherwise
    try:
        with stop_flag() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert not stop.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", ["flip", "truncate", "missing"])
def test_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "run/hf").iterdir():
        path.unlink()
    file = tmp_path / "run/checkpoints/step-00000012/state/block-00001.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        train(make_config(tmp_path))
    assert "step-00000012" in caplog.text
    assert "block-00001.safetensors" in caplog.text
    assert_same_runs(tmp_path / "run", whole / "run")


def test_no_resume_refuses_a_directory_with_a_run(whole: Path) -> None:
    with pytest.raises(OutputError, match="holds a run already"):
        train(make_config(whole), resume="no")


def test_foreign_files_and_unwritable_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.docx").write_text("mine")
    with pytest.raises(OutputError, match=r"thesis\.docx"):
        train(make_config(tmp_path))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.docx"]
    with pytest.raises(OutputError, match="is a file"):
        train(make_config(tmp_path, "corpus.txt"))


def test_resume_refuses_other_precision_and_unknown_path(whole: Path, tmp_path: Path) -> None:
    newest = max((whole / "run/checkpoints").iterdir())
    with pytest.raises(CheckpointError, match="precision"):
        train(make_config(tmp_path, train={"precision": "bf16"}), resume=str(newest))
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        train(make_config(tmp_path), resume=str(tmp_path / "nowhere"))


def test_going_back_within_a_run_is_refused(whole: Path) -> None:
    earlier = min((whole / "run/checkpoints").iterdir())
    with pytest.raises(CheckpointError, match="step-00000012"):
        train(make_config(whole), resume=str(earlier))


def test_second_run_in_one_directory_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with loop.RunDirectory(Path(config.out)).lock(), pytest.raises(OutputError, match="in use"):
        train(config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("optim", "words", "skipped"),
    [
        ({"max_skipped_steps": 3}, "3 steps in a row", [True] * 3),
        ({"updates": "immediate", "max_grad_norm": None}, "step 1: the gradient's norm is nan", [False]),
    ],
    ids=["skipped", "updated"],
)
def test_steps_that_stay_non_finite_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: dict[str, Any], words: str, skipped: list[bool]
) -> None:
    """And nothing of them takes the place of a checkpoint that is sound."""
    prepare = loop.prepare

    def poisoned(*args: Any, **options: Any) -> Any:
        run = prepare(*args, **options)
        weight = next(parameter for parameter in run.engine.model.parameters() if parameter.ndim == 2)
        weight.data.fill_(float("nan"))
        return run

    monkeypatch.setattr(loop, "prepare", poisoned)
    with pytest.raises(DivergedError, match=words):
        train(make_config(tmp_path, optim=optim, checkpoint={"every": 1}, log={"report": False}))
    rows = rows_of(tmp_path / "run")
    assert [row["skipped"] for row in rows] == skipped
    assert len(list((tmp_path / "run/checkpoints").glob("*"))) == len(skipped) - 1


def test_export_and_sample(whole: Path, tmp_path: Path) -> None:
    export_run(whole / "run", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    final = AutoModelForCausalLM.from_pretrained(whole / "run/hf")
    for (name, left), (_, right) in zip(exported.named_parameters(), final.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    assert not (tmp_path / "out/state").exists()
    with pytest.raises(OutputError, match="not an empty directory"):
        export_run(whole / "run", tmp_path / "out")
    text = sample(str(whole / "run"), "one small", max_new_tokens=5)
    assert text.startswith("one small")
    assert text == sample(str(tmp_path / "out"), "one small", max_new_tokens=5)


def test_deterministic_run_resumes_bit_for_bit_and_its_checkpoint_knows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    optim = {"warmup_steps": 0, "schedule": "constant"}
    step, seen = loop.train_step, []

    def watched(run: Run) -> StepMetrics:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return step(run)

    monkeypatch.setattr(loop, "train_step", watched)

    def run(out: str, part: str = "auto") -> None:
        settings = {"steps": 3, "deterministic": True}
        every = {"every": 2, "keep_last": None}
        train(make_config(tmp_path, out, train=settings, optim=optim, checkpoint=every), resume=part)

    run("whole")
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        run("rest", str(tmp_path / "whole/checkpoints/step-00000002"))
    assert "changed settings" not in caplog.text
    assert seen == [True] * 4
    left, right = state_of(tmp_path / "rest"), state_of(tmp_path / "whole")
    for name, tensor in right.items():
        assert torch.equal(left[name], tensor), name
    plain = make_config(tmp_path, "rest", train={"steps": 3}, optim=optim)
    saved = deepcopy(dict(verify(tmp_path / "rest/checkpoints/step-00000003").meta["config"]))
    assert changed_settings(saved, plain) == ["train.deterministic True -> False"]
    del saved["train"]["deterministic"]
    assert changed_settings(saved, plain) == [], "an older checkpoint lacks it, and had none of it"
    assert "deterministic: true" in (tmp_path / "rest/config.yaml").read_text()
    assert not torch.are_deterministic_algorithms_enabled()
