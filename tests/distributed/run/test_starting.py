"""What `--ranks` says before it starts any process, and after all have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.save import save
from megatrain.cli.ranks import start_ranks
from megatrain.config import Config
from megatrain.distributed import launch
from megatrain.distributed.launch import Ended
from megatrain.errors import CheckpointError, ConfigError, MegatrainError, OutputError
from megatrain.train.records.directory import RunDirectory
from tests.train.project import make_config


def saved_by(root: Path, shards: int) -> None:
    """Leave what a run with so many shards has saved at its second step."""
    config = make_config(root, parallel={"shards": shards}, train={"grad_accumulation": 8})
    directory = RunDirectory(root / "run")
    directory.path.mkdir()
    directory.begin(config)
    data = {"fingerprint": "a", "epoch": 0, "position": 0, "seed": 0, "shuffle": True}
    counts = dict.fromkeys(("tokens", "skipped", "skipped_in_a_row"), 0)
    meta = {"step": 2, "updates": 2, "schedule": {"last_epoch": 2}, "data": data, "rng": {}, **counts}
    meta["config"] = config.model_dump(mode="json")

    def write(directory: Path) -> None:
        (directory / "file").write_text("a")

    save(directory.checkpoints, step=2, write=write, meta=meta, keep_last=1)


def contents(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def start(config: Config, ranks: int = 2) -> int:
    return start_ranks(config, ranks, ["train", "file.yaml", "parallel.shards=2"], dry_run=False)


@pytest.mark.parametrize(
    ("ranks", "sections", "error", "sentence"),
    [
        (3, {}, ConfigError, "--ranks is 3; use a power of two, such as 2 or 4"),
        (4, {}, ConfigError, "6 micro-batches .* into 4 equally .* use 4 or 8 micro-batches"),
        (8, {}, ConfigError, "6 micro-batches .* into 8 equally long runs .* use 8 micro-batches"),
        (2, {"parallel": {"shards": 1}}, ConfigError, "1 runs .* which 2 ranks cannot share out"),
        (2, {"checkpoint": {"resume": "gone"}}, CheckpointError, "gone is not a checkpoint directory"),
    ],
    ids=str,
)
def test_what_every_rank_would_refuse_is_refused_before_any_is_started(
    tmp_path: Path, ranks: int, sections: dict[str, Any], error: type[MegatrainError], sentence: str
) -> None:
    config = make_config(tmp_path, train={"grad_accumulation": 6}, **sections)
    before = contents(tmp_path)
    with pytest.raises(error, match=sentence):
        start(config, ranks)
    assert contents(tmp_path) == before


def test_ranks_of_torchrun_start_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"one of 2 \(WORLD_SIZE\); leave --ranks away"):
        start(make_config(tmp_path))


@pytest.mark.parametrize(
    ("ranks", "resume", "error", "sentence"),
    [
        (2, "no", OutputError, "run holds a run already; give a new directory with --out, or use --resume"),
        (8, "auto", ConfigError, r"4 runs \(parallel.shards\), which 8 ranks cannot share out evenly"),
        (2, "run", CheckpointError, "run is no checkpoint but holds some; give one of them, such as run/che"),
        (2, "run/checkpoints", CheckpointError, "such as run/checkpoints/step-"),
    ],
)
def test_a_directory_that_was_used_is_left_as_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    resume: str,
    error: type[MegatrainError],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_by(tmp_path, 4)
    before = contents(tmp_path)
    config = make_config(tmp_path, train={"grad_accumulation": 8}, checkpoint={"resume": resume})
    with pytest.raises(error, match=sentence):
        start(config, ranks)
    assert contents(tmp_path) == before


def test_a_directory_in_which_another_run_trains_is_left_as_it_is(tmp_path: Path) -> None:
    saved_by(tmp_path, 4)
    before = contents(tmp_path)
    with RunDirectory(tmp_path / "run").lock(), pytest.raises(OutputError, match="in use by another run"):
        start(make_config(tmp_path))
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("has_checkpoint", "again"),
    [
        (False, ["train", "file.yaml", "checkpoint.resume=auto", "parallel.shards=2"]),
        (True, ["train", "file.yaml", "parallel.shards=2", "checkpoint.resume=auto"]),
    ],
)
def test_settings_of_those_that_go_on_take_the_place_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_checkpoint: bool, again: list[str]
) -> None:
    config = make_config(tmp_path, parallel={"shards": 2})
    found: list[list[str]] = []

    def run(*_: Any, **asked: Any) -> int:
        if has_checkpoint:
            saved_by(tmp_path, 2)
        found.append(asked["again"]())
        return 0

    monkeypatch.setattr(launch, "run_ranks", run)
    given = ["train", "file.yaml", "parallel.shards=2", 'checkpoint.resume="auto"']
    assert start_ranks(config, 2, given, dry_run=False) == 0
    assert found == [again]


@pytest.mark.parametrize(
    ("ended", "said", "is_recorded"),
    [
        (Ended({0: 75}, {}, 2), "", False),
        (Ended({0: -15, 1: -15}, {}, 2), "ended by SIGINT; the same command goes on", False),
        (Ended({0: 2, 1: -15}, {0: "it is so"}), "", True),
        (Ended({1: -9, 0: 7}, {}), "rank 1 was killed (SIGKILL); the same command goes on", True),
    ],
    ids=str,
)
def test_an_end_that_was_asked_for_or_told_is_no_loss_of_a_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ended: Ended,
    said: str,
    is_recorded: bool,
) -> None:
    def run(*_: Any, **asked: Any) -> int:
        saved_by(tmp_path, 2)
        asked["tell"](ended, 0)
        return ended.exit_code

    monkeypatch.setattr(launch, "run_ranks", run)
    config = make_config(tmp_path, log={"report": False})
    assert start(config) == ended.exit_code
    assert caplog.messages == [] if not said else caplog.messages[0].startswith(said)
    assert len(caplog.messages) <= 1
    assert (tmp_path / "run/events.jsonl").exists() == is_recorded
