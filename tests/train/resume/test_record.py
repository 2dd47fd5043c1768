"""The record of a run in a manifest is what a run writes, or is refused with the member that is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.load import find, verify
from megatrain.errors import CheckpointError
from megatrain.train.loop import train
from megatrain.train.resume.record import record_refused, require_record
from tests.train.project import make_config


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("run")
    train(make_config(root, train={"steps": 2}, optim={"warmup_steps": 0}))
    return dict(verify(find(root / "run/checkpoints")[0]).meta)


def test_what_a_run_writes_is_fine(record: dict[str, Any]) -> None:
    require_record(record, "here")
    for name in (
        "targets",
        "losses",
        "last_good",
        "evaluation",
        "callbacks",
        "drive_written_bytes",
        "is_last",
    ):
        require_record({key: value for key, value in record.items() if key != name}, "here")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -1),
        ("step", True),
        ("step", 10**9),  # it would be counted to
        ("schedule.last_epoch", 10**18),
        ("data.position", "3"),
        ("data", []),
        ("updates", {"a": -1}),
        ("rng", None),
        ("config", "text"),
        ("config.train", {}),
        ("losses", [1.0, "2"]),
        ("last_good.saved", [[]]),
        ("evaluation.best_loss", "low"),
        ("config.parallel.shards", 10**6),
    ],
)
def test_another_member_is_named(record: dict[str, Any], key: str, value: Any) -> None:
    changed = copy.deepcopy(record)
    *parents, leaf = key.split(".")
    place = changed
    for parent in parents:
        place = place[parent]
    place[leaf] = value
    with pytest.raises(
        CheckpointError, match=r"in here is not one that megatrain writes \(it has (no|a wrong) "
    ) as caught:
        require_record(changed, "here")
    assert key.split(".")[0] in str(caught.value)


def test_an_error_that_odd_values_cause_is_a_refusal() -> None:
    with (
        pytest.raises(CheckpointError, match=r"writes \(KeyError: 'words'\); resume from another"),
        record_refused(Path("here")),
    ):
        raise KeyError("words")
    with pytest.raises(AssertionError), record_refused(Path("here")):
        raise AssertionError  # a mistake of ours
