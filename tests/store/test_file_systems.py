"""State on drives is refused where its commits would not be safe, and the step that was committed stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatrain.errors import OutputError, warn_once
from megatrain.filesystems import named_filesystem
from megatrain.store.drives import drive as drive_module
from megatrain.store.drives import system as calls
from megatrain.store.drives.record import RECORD_NAME
from tests.store.disks import holds, make_store, write_step


class ReplacesNothing(calls.DriveCalls):
    """A file system on which no file can take another's name at once."""

    def rename(self, source: Path, target: Path) -> None:
        if target.exists():
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        super().rename(source, target)


class ForgetsNames(calls.DriveCalls):
    """A file system that cannot make names durable."""

    def fsync(self, descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().fsync(descriptor)


def test_a_commit_that_cannot_replace_the_one_before_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    store.create()
    write_step(store, 1)
    monkeypatch.setattr(calls, "system", ReplacesNothing())
    with pytest.raises(OutputError, match=rf"{RECORD_NAME}: File exists; check this path and its drive"):
        write_step(store, 2)
    monkeypatch.undo()
    store.close()
    again = make_store(tmp_path)
    assert again.resume().step == 1
    assert holds(again, 1)


def test_names_that_cannot_be_made_durable_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "system", ForgetsNames())
    store = make_store(tmp_path)
    with pytest.raises(OutputError, match="Invalid argument; check this path and its drive"):
        store.create()


def test_a_drive_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    warn_once.cache_clear()
    monkeypatch.setattr(drive_module.fcntl, "flock", fail)
    store = make_store(tmp_path, 2)
    store.create()
    write_step(store, 1)
    assert holds(store, 1)
    assert caplog.text.count(f"the file system {named_filesystem(tmp_path)} has no locks here") == 1
