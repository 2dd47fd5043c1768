"""Runs that are stopped and gone on with again and again, or from any step: the bits are those of one run."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.load import find, verify
from megatrain.config import Config
from megatrain.train import loop
from megatrain.train.loop import train
from tests.train.evaluate.test_evaluation import losses_of
from tests.train.project import WORDS, make_config
from tests.train.test_adapters import config_of, write_base
from tests.train.test_loop import assert_same_runs, rows_of

KINDS = ("model", "adapters")


def write_documents(file: Path, number: int) -> None:
    """Write documents of one to twenty-four words each, which are packed whole."""
    chance = random.Random(0)
    texts = (" ".join(chance.choices(WORDS, k=chance.randint(1, 24))) for _ in range(number))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def settings_of(root: Path, out: str, kind: str, **sections: dict[str, Any]) -> Config:
    """Return the settings of a run: a model on text, or adapters on packed documents, with evaluations."""
    raw: dict[str, dict[str, Any]] = {
        "train": {"precision": "bf16"},
        "optim": {"schedule": "constant", "warmup_steps": 0},  # `train.steps` is another at each start
        "checkpoint": {"every": 1},
        "log": {"report": False},
    }
    if kind == "adapters":
        raw["data"] = {"path": str(root / "documents.jsonl"), "packing": "best_fit", "val_size": 0.1}
        raw["eval"] = {"every": 4, "batches": 2}
    for section, values in sections.items():
        raw[section] = raw.get(section, {}) | values
    return (config_of if kind == "adapters" else make_config)(root, out, **raw)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights and a tokenizer, text, and documents of about eight steps."""
    root = write_base(tmp_path_factory.mktemp("base"))
    write_documents(root / "documents.jsonl", 75)
    return root


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process have a SIGTERM when it has taken so many steps of a run."""
    inner, begun = loop.train_step, []

    def stepping(run: Any) -> Any:
        begun.append(run.step)
        row = inner(run)
        if len(begun) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return row

    monkeypatch.setattr(loop, "train_step", stepping)


@pytest.mark.parametrize(
    ("kind", "resumes"),
    [
        ("adapters", 5),
        *(pytest.param(kind, 100, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]) for kind in KINDS),
    ],
)
def test_a_chain_of_resumes_has_the_bits_of_one_run(
    base: Path, monkeypatch: pytest.MonkeyPatch, kind: str, resumes: int
) -> None:
    """Each start takes one step or two, and ends by a signal or because it was to take no more."""
    chance, out = random.Random(resumes), f"{kind}-{resumes}"
    takes = [chance.choice((1, 2)) for _ in range(resumes + 1)]
    steps, done, ends = sum(takes), 0, {"signal": 0, "steps": 0}
    train(settings_of(base, f"{out}-whole", kind, train={"steps": steps}))
    for take in takes:
        done += take
        if done < steps and chance.random() < 0.5:
            with monkeypatch.context() as patch:
                stop_after(take, patch)
                with pytest.raises(SystemExit) as end:
                    train(settings_of(base, out, kind, train={"steps": steps}))
            assert end.value.code == 75
            ends["signal"] += 1
        else:
            train(settings_of(base, out, kind, train={"steps": done}))
            ends["steps"] += 1
        newest, *_ = find(base / out / "checkpoints")
        assert verify(newest).step == done
    assert min(ends.values()) >= resumes // 3
    assert_same_runs(base / out, base / f"{out}-whole")
    if kind == "adapters":
        found, expected = (losses_of(base / run) for run in (out, f"{out}-whole"))
        assert expected
        assert {step: found[step] for step in expected} == expected


EPOCHS = 3


def in_epochs(base: Path, out: str) -> Config:
    """Return the settings of a run of some epochs; it saves its best step, its last, and that of a stop."""
    return settings_of(
        base, out, "adapters", train={"steps": None, "epochs": EPOCHS}, checkpoint={"every": None}
    )


@pytest.fixture(scope="module")
def epochs(base: Path) -> Path:
    """A run of three epochs that nothing stops."""
    train(in_epochs(base, "epochs"))
    return base / "epochs"


@pytest.mark.parametrize(
    "share",
    [
        pytest.param((0, 1), id="around the end of an epoch"),
        pytest.param(None, id="every step", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_a_run_stopped_at_any_step_of_three_epochs_goes_on_to_the_same_bits(
    base: Path, epochs: Path, monkeypatch: pytest.MonkeyPatch, share: tuple[int, ...] | None
) -> None:
    """With packed documents, adapters with dropout, and evaluations, that of the stop itself among them."""
    losses, steps = losses_of(epochs), len(rows_of(epochs))
    of_epoch = steps // EPOCHS
    assert steps == EPOCHS * of_epoch >= 18
    assert len(losses) >= 2 * EPOCHS
    places = range(1, steps) if share is None else [2 * of_epoch + place for place in share]
    for place in places:
        out = f"stopped-at-{place}"
        with monkeypatch.context() as patch:
            stop_after(place, patch)
            with pytest.raises(SystemExit) as end:
                train(in_epochs(base, out))
        assert end.value.code == 75
        newest, *_ = find(base / out / "checkpoints")
        assert verify(newest).step == place
        train(in_epochs(base, out))
        assert_same_runs(base / out, epochs)
        assert losses_of(base / out) == losses, place
