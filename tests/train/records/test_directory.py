"""The run directory is for its user only, and nothing in it is reached through a link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatrain import files
from megatrain.errors import OutputError, warn_once
from megatrain.filesystems import named_filesystem
from megatrain.train.loop import train
from megatrain.train.outputs.export import export_run
from megatrain.train.records import directory as directory_module
from megatrain.train.records import lock as lock_module
from megatrain.train.records.directory import RunDirectory
from tests.train.project import make_config

SHORT: dict[str, Any] = {
    "train": {"steps": 2},
    "optim": {"warmup_steps": 0},
    "checkpoint": {"every": 1, "keep_last": 2},
}


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def wrong_modes(root: Path) -> list[str]:
    """List what is not 0700 or 0600, the directory itself included."""
    found = []
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode != (0o700 if path.is_dir() else 0o600):
            found.append(f"{path.relative_to(root)} {mode:o}")
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
def test_run_and_export_are_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    config = make_config(tmp_path, **SHORT)
    with umask(mask):
        train(config)
        export_run(tmp_path / "run", tmp_path / "exported")
    assert wrong_modes(tmp_path / "run") == []
    assert wrong_modes(tmp_path / "exported") == []
    assert len(list((tmp_path / "run").rglob("*"))) > 25


def test_directory_that_the_user_made_keeps_its_mode(tmp_path: Path) -> None:
    config = make_config(tmp_path, **SHORT)
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o750)
    with umask(0o000):
        train(config)
    assert wrong_modes(tmp_path / "run") == [". 750"]


def test_run_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch/runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "scratch/runs")
    (tmp_path / "scratch/one").mkdir()
    (tmp_path / "scratch/runs/one").symlink_to(tmp_path / "scratch/one")
    train(make_config(tmp_path, "runs/one", **SHORT))
    train(make_config(tmp_path, "runs/one", **SHORT | {"train": {"steps": 3}}))
    assert (tmp_path / "scratch/one/hf/config.json").is_file()
    assert len((tmp_path / "scratch/one/metrics.jsonl").read_bytes().splitlines()) == 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    train(make_config(root, **SHORT))
    return root


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "metrics.damaged.jsonl",
        "config.yaml",
        "env.json",
        "plan.json",
        "events.jsonl",
        "report.html",
        "checkpoints",
        "hf",
    ],
)
def test_link_in_a_run_directory_is_refused_and_its_target_kept(
    trained: Path, tmp_path: Path, name: str
) -> None:
    run = RunDirectory(trained / "run").path
    outside = tmp_path / "outside"
    place = run / name
    kept = tmp_path / "kept"
    if place.exists():
        place.rename(kept)
    try:
        if name in ("checkpoints", "hf"):
            outside.mkdir()
            (outside / "config.json").write_text("mine")
        else:
            outside.write_text("mine")
        place.symlink_to(outside)
        with pytest.raises(OutputError, match=rf"{name} is a symbolic link, and links are not followed"):
            train(make_config(trained, **SHORT | {"train": {"steps": 3}}))
        inner = outside / "config.json" if outside.is_dir() else outside
        assert inner.read_text() == "mine"
        assert place.is_symlink()
    finally:
        place.unlink()
        if kept.exists():
            kept.rename(place)


def test_link_that_appears_after_the_check_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files themselves are opened without following links: nothing depends on the check."""
    monkeypatch.setattr(RunDirectory, "check", lambda self: None)
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run/metrics.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(OutputError, match=r"metrics\.jsonl: it is a symbolic link"):
        train(make_config(tmp_path, **SHORT))
    assert (tmp_path / "mine").read_text() == "mine"


def test_export_to_a_link_is_refused(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "dangling"):
        with pytest.raises(OutputError, match="is a symbolic link; give a new directory"):
            export_run(trained / "run", tmp_path / name)
    assert list((tmp_path / "empty").iterdir()) == []
    assert not (tmp_path / "nothing").exists()


def test_lock_that_the_disk_refuses_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(lock_module.fcntl, "flock", fail)
    with (
        pytest.raises(OutputError, match=r"cannot lock the run directory \S+: Input/output error"),
        RunDirectory(tmp_path / "run").lock(),
    ):
        pytest.fail("not locked")
    assert not (tmp_path / "run").exists()


def test_filesystem_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(lock_module.fcntl, "flock", fail)
    warn_once.cache_clear()
    with RunDirectory(tmp_path / "run").lock():
        assert (tmp_path / "run").is_dir()
        assert not RunDirectory(tmp_path / "run").is_in_use  # several ranks would be refused else
    assert f"the file system {named_filesystem(tmp_path)} has no locks here" in caplog.text


def test_what_a_crash_left_goes_and_what_only_looks_alike_stays(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    (run.path / ".config.yaml.tmp-0123abcd").write_text("half")
    run.check()  # a run that was killed in its first moment may begin again
    run.remove_leftovers()
    assert list(run.path.iterdir()) == []
    for name in (".config.yaml.tmp-0123abcx", ".notes.tmp-0123abcd", "config.yaml.tmp-0123abcd"):
        assert files.temporary_of(name) not in directory_module._OURS
