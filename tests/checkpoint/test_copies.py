"""A checkpoint may be copied away at any time: the copy is whole, or it is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain import files
from megatrain.checkpoint import load, save
from tests.checkpoint.faults import Watched, put

NAMES = ("config.json", "model.safetensors", "state/block-0.safetensors", "state/block-1.safetensors")


def write(directory: Path) -> None:
    """Put files as a run has them into a checkpoint, each of other bytes than before."""
    (directory / "state").mkdir()
    for name in NAMES:
        (directory / name).write_bytes(os.urandom(300))


def saved(root: Path, step: int, *, keep_last: int = 1) -> Path:
    return save.save(root, step=step, write=write, meta={"step": step}, keep_last=keep_last)


def content(checkpoint: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(checkpoint)): file.read_bytes()
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file()
    }


def test_a_copy_that_verifies_is_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "checkpoints", 1)
    copy = Path(shutil.copytree(checkpoint, tmp_path / "backup/first"))
    before = content(checkpoint)
    saved(tmp_path / "checkpoints", 2)
    assert not checkpoint.exists()
    assert load.verify(copy).step == 1
    assert content(copy) == before
    (copy / NAMES[2]).write_bytes(os.urandom(300))
    with pytest.raises(load.DamagedError, match=NAMES[2]):
        load.verify(copy)


class Copier:
    """Copies an open directory file by file, in the order of names, and goes on wherever it is renamed to."""

    def __init__(self, source: Path, target: Path) -> None:
        self._descriptor = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
        self._target = target
        self._names = iter(sorted(content(source)))
        self.is_done = False

    def copy(self, num_files: int = 1000) -> None:
        """Copy the next files; one that is gone is left out, as by rsync and cp."""
        for name, _ in zip(self._names, range(num_files), strict=False):
            try:
                descriptor = os.open(name, os.O_RDONLY, dir_fd=self._descriptor)
            except FileNotFoundError:
                continue
            (self._target / name).parent.mkdir(parents=True, exist_ok=True)
            with open(descriptor, "rb") as file:
                (self._target / name).write_bytes(file.read())

    def close(self) -> None:
        os.close(self._descriptor)


class CopiedBetween(Watched):
    """Lets a copier go on for all files that are left before one call of a removal."""

    def __init__(self, copier: Copier, call: int) -> None:
        super().__init__()
        self._copier, self._call = copier, call

    def before(self, call: str, path: Path) -> None:
        if self.num_calls == self._call:
            self._copier.copy()


def races() -> Iterator[tuple[int, int]]:
    """Yield how many files are copied before a removal, and before which of its calls the others are."""
    yield from ((num_files, call) for num_files in range(len(NAMES) + 2) for call in range(24))


def test_a_copy_made_while_it_is_removed_is_whole_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing between the two is ever taken for a checkpoint, however copier and removal meet."""
    num_whole = num_refused = most_calls = 0
    for num_files, call in races():
        root, target = tmp_path / f"{num_files}-{call}", tmp_path / f"copy-{num_files}-{call}"
        target.mkdir()
        checkpoint = saved(root, 1, keep_last=2)
        before = content(checkpoint)
        newest = saved(root, 2, keep_last=2)
        copier = Copier(checkpoint, target)
        copier.copy(num_files)
        calls = CopiedBetween(copier, call)
        with monkeypatch.context() as patch:
            patch.setattr(files, "system", calls)
            save.retain(newest, keep_last=1)
        most_calls = max(most_calls, calls.num_calls)
        copier.copy()
        copier.close()
        assert not checkpoint.exists()
        try:
            load.verify(target)
        except load.DamagedError:
            num_refused += 1
        else:
            num_whole += 1
            assert content(target) == before
    assert 10 < most_calls < 24  # each call of the removal was met
    assert num_whole > 20
    assert num_refused > 20


def test_hard_links_outlive_a_removal(tmp_path: Path) -> None:
    """A removal takes names away and changes no file: `cp -al` needs no room and loses no race."""
    checkpoint = saved(tmp_path / "checkpoints", 1)
    before = content(checkpoint)
    linked = Path(shutil.copytree(checkpoint, tmp_path / "linked", copy_function=os.link))
    for step in (2, 3):
        saved(tmp_path / "checkpoints", step)
    assert not checkpoint.exists()
    assert load.verify(linked).step == 1
    assert content(linked) == before
    assert {(linked / name).stat().st_nlink for name in NAMES} == {1}


def test_nobody_opens_a_file_of_a_checkpoint_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved(tmp_path, 1, keep_last=3)
    opened: list[Path] = []

    class Noted(Watched):
        def open(self, path: Path, flags: int) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                opened.append(path)
            return super().open(path, flags)

    monkeypatch.setattr(files, "system", Noted())
    for step in (2, 3, 4, 4):
        saved(tmp_path, step, keep_last=2)
    put(tmp_path, 5, "other", keep_last=2)
    assert opened != []
    assert not [path for path in opened if not path.relative_to(tmp_path).parts[0].startswith(".tmp-step-")]
    assert not checkpoint.exists()
