from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain import files
from megatrain.checkpoint import format, load
from megatrain.errors import CheckpointError
from tests.checkpoint.faults import Watched, put
from tests.checkpoint.test_format import seal

NAMES = ["weights.safetensors", "deep/moments", "plain", "MANIFEST.json"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two whole checkpoints."""
    monkeypatch.setattr(files, "system", Watched())
    monkeypatch.setattr(format, "CHUNK_BYTES", 100)
    for step in (10, 20):
        put(tmp_path, step, str(step))
    return tmp_path


def one_before_is_used(root: Path) -> str:
    """Assert that the first checkpoint is used; return what was said of the second."""
    said: list[str] = []
    found = load.newest_whole(root, warn=said.append)
    assert found is not None
    assert found[0] == root / "step-00000010"
    assert len(said) == 1
    assert "\n" not in said[0]
    assert said[0].startswith(f"checkpoint {root / 'step-00000020'} is damaged: ")
    assert said[0].endswith("; trying the one before it, step-00000010")
    return said[0]


@pytest.mark.parametrize("name", NAMES)
def test_flipped_bit_is_named_and_the_one_before_used(root: Path, name: str) -> None:
    path, chance = root / "step-00000020" / name, random.Random(0)
    data = path.read_bytes()
    for _ in range(60):
        index, bit = chance.randrange(len(data)), chance.randrange(8)
        path.write_bytes(data[:index] + bytes([data[index] ^ 1 << bit]) + data[index + 1 :])
        said = one_before_is_used(root)
        assert name in said
        if name != "MANIFEST.json":
            begin = index // 100 * 100
            assert f"between bytes {begin} and {min(begin + 100, len(data))}" in said


@pytest.mark.parametrize("name", NAMES)
def test_truncated_or_longer_file_is_named_and_the_one_before_used(root: Path, name: str) -> None:
    path, chance = root / "step-00000020" / name, random.Random(0)
    data = path.read_bytes()
    for size in [0, 1, len(data) - 1, *(chance.randrange(len(data)) for _ in range(20))]:
        path.write_bytes(data[:size])
        assert name in one_before_is_used(root)
    path.write_bytes(data + b"\n")
    assert name in one_before_is_used(root)


def link(path: Path) -> None:
    (path / "plain").unlink()
    (path / "plain").symlink_to("/etc/passwd")


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def shift(path: Path) -> None:
    data = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(data[3:] + data[:3])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "plain").unlink(), "plain is missing"),
        (lambda path: (path / "MANIFEST.json").unlink(), "MANIFEST.json is missing"),
        (lambda path: (path / "notes").touch(), "notes is not in MANIFEST.json"),
        (
            lambda path: (path / "plain").rename(path / "other"),
            "plain is missing, and other is there without",
        ),
        (lambda path: shutil.rmtree(path / "deep"), "deep/moments is missing"),
        (lambda path: shutil.copy(path.parent / "step-00000010" / "plain", path), "plain has wrong contents"),
        (
            lambda path: shutil.copy(path.parent / "step-00000010" / "MANIFEST.json", path),
            "MANIFEST.json is that of step 10",
        ),
        (shift, "weights.safetensors has wrong contents between bytes 0 and 100"),
        (link, "plain is not a regular file"),
        (empty, "MANIFEST.json is missing"),
    ],
)
def test_other_damage_is_named_and_the_one_before_used(
    root: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(root / "step-00000020")
    assert words in one_before_is_used(root)


def test_checkpoint_under_the_name_of_another_step_is_not_used(root: Path) -> None:
    (root / "step-00000020").rename(root / "step-00000030")
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json is that of step 20"):
        load.verify(root / "step-00000030")


def test_copied_and_renamed_checkpoint_is_whole(root: Path) -> None:
    shutil.copytree(root / "step-00000020", root / "my best")
    assert load.verify(root / "my best").step == 20
    assert [path.name for path in load.find(root)] == ["step-00000020", "step-00000010"]


def test_no_checkpoint_is_none_and_no_whole_one_an_error(root: Path) -> None:
    assert load.newest_whole(root / "nowhere", warn=pytest.fail) is None
    (root / "new").mkdir()
    assert load.newest_whole(root / "new", warn=pytest.fail) is None
    for step in (10, 20):
        (root / format.directory_name(step) / "plain").unlink()
    words = r"no checkpoint in .* is whole: step-00000020 \(plain is missing\), step-00000010 \(plain is miss"
    with pytest.raises(CheckpointError, match=words):
        load.newest_whole(root, warn=lambda said: None)


def test_checkpoint_of_a_later_version_is_refused_rather_than_passed_over(root: Path) -> None:
    path = root / "step-00000020" / "MANIFEST.json"
    path.write_bytes(seal({**json.loads(path.read_bytes()), "format": 2}))
    with pytest.raises(
        CheckpointError, match=f"checkpoint {re.escape(str(path.parent))} cannot be read: .* version 2"
    ):
        load.newest_whole(root, warn=pytest.fail)


def test_path_without_a_checkpoint_is_refused(root: Path) -> None:
    for name in ("nowhere", "step-00000020/plain"):
        with pytest.raises(CheckpointError, match="there is no checkpoint directory"):
            load.verify(root / name)
    with pytest.raises(CheckpointError, match="cannot read the checkpoints in"):
        load.find(root / "step-00000020" / "plain")


@pytest.mark.parametrize(
    ("number", "is_damage"), [(errno.EIO, True), (errno.EMFILE, False), (errno.EACCES, False)]
)
def test_only_what_is_damaged_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_damage: bool
) -> None:
    """Too many open files say nothing about a checkpoint: going back to an older one would lose its steps."""
    put(tmp_path, 10, "a")
    put(tmp_path, 20, "b")

    class Refusing(files.FileCalls):
        def open(self, path: Path, flags: int) -> int:
            if path == tmp_path / "step-00000020/plain":
                raise OSError(number, os.strerror(number), str(path))
            return super().open(path, flags)

    monkeypatch.setattr(files, "system", Refusing())
    warnings: list[str] = []
    if is_damage:
        found = load.newest_whole(tmp_path, warn=warnings.append)
        assert found is not None
        assert found[1].step == 10
        assert "plain cannot be read: Input/output error" in warnings[0]
    else:
        words = rf"cannot read plain of \S+step-00000020: {os.strerror(number)}"
        with pytest.raises(CheckpointError, match=words):
            load.newest_whole(tmp_path, warn=warnings.append)
        assert warnings == []
