"""The room of the directories that state goes to."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrain.store.drives.places import STATE_NAME, room_of

KIB = 1 << 10


@pytest.fixture
def drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two directories: `a` on a drive with 100 KiB free, and `b` on one with 30 KiB."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    stat, numbers = os.stat, {"a": 71, "b": 72}

    def name_of(path: object) -> str:
        return Path(str(path)).relative_to(tmp_path).parts[0]

    def on_drives(path: object, **named: object) -> object:
        if not str(path).startswith(str(tmp_path / "")):
            return stat(path, **named)  # type: ignore[arg-type]
        found = stat(path, **named)  # type: ignore[arg-type]
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**fields | {"st_dev": numbers.get(name_of(path), 70)})

    free = {"a": 100 * KIB, "b": 30 * KIB}
    monkeypatch.setattr("megatrain.store.drives.places.free_bytes", lambda path: free[name_of(path)])
    monkeypatch.setattr("megatrain.store.drives.places.os.stat", on_drives)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "kib"),
    [
        (["a"], 100),
        (["a", "b"], 60),  # half of it is on each
        (["a/x", "a/y/z"], 100),  # one drive, once
        (["a", "a"], 100),
        (["a/x", "a/y", "b"], 90),
    ],
)
def test_room_is_that_of_each_drive_once(drives: Path, names: list[str], kib: int) -> None:
    assert room_of([drives / name for name in names]) == kib * KIB


def test_the_state_of_an_earlier_run_is_room(drives: Path) -> None:
    """A run that goes on has taken its room already."""
    file = drives / "a" / STATE_NAME
    file.write_bytes(bytes(64 * KIB))
    assert room_of([drives / "a"]) == 100 * KIB + file.stat().st_blocks * 512
