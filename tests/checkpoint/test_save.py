from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from megatrain.checkpoint import format, load, save
from megatrain.errors import OutputError
from tests.checkpoint.faults import newest, put


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    """Whatever way the files were written, all of them are listed, and the meta comes back."""
    meta = {"cursor": {"epoch": 1, "row": 7}, "loss": 0.1}

    def write(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "a" / "b").mkdir(parents=True)
        (directory / "a" / "b" / "c").write_bytes(os.urandom(1000))
        (directory / "nothing").touch()

    root = tmp_path / "run" / "checkpoints"
    path = save.save(root, step=150, write=write, meta=meta, keep_last=1)
    assert path == root / "step-00000150"
    found = load.newest_whole(root, warn=pytest.fail)
    assert found is not None
    assert found[0] == path
    assert found[1].meta == meta
    assert [(entry.name, entry.num_bytes) for entry in found[1].files] == [
        ("a/b/c", 1000),
        ("config.json", 2),
        ("nothing", 0),
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        put(tmp_path, step, str(step), keep_last=3)
        assert names(tmp_path) == [format.directory_name(kept) for kept in range(max(1, step - 2), step + 1)]
    put(tmp_path, 7, "7", keep_last=1)
    assert names(tmp_path) == ["step-00000007"]


def test_what_is_not_a_whole_checkpoint_of_ours_is_never_removed(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere", 3, "linked")
    (tmp_path / "step-00000003").symlink_to(tmp_path / "elsewhere" / "step-00000003")
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000005").write_text("a file")
    put(tmp_path, 6, "damaged")
    (tmp_path / "step-00000006" / "plain").unlink()
    put(tmp_path, 7, "added to")
    (tmp_path / "step-00000007" / "notes").write_text("mine")
    (tmp_path / "step-00000008-best").mkdir()
    (tmp_path / ".tmp-mine").mkdir()
    (tmp_path / ".trash-step-00000001-0123abcd").write_text("a file")
    foreign = names(tmp_path)
    put(tmp_path, 10, "a", keep_last=1)
    put(tmp_path, 20, "b", keep_last=1)
    assert names(tmp_path) == sorted([*foreign, "step-00000020"])
    assert (tmp_path / "elsewhere" / "step-00000003" / "plain").exists()


def test_later_steps_of_a_run_taken_back_are_not_touched_and_not_counted(tmp_path: Path) -> None:
    for step in (100, 150, 200):
        put(tmp_path, step, "first")
    put(tmp_path, 110, "second", keep_last=2)
    put(tmp_path, 120, "second", keep_last=2)
    assert names(tmp_path) == [format.directory_name(step) for step in (110, 120, 150, 200)]
    put(tmp_path, 200, "second", keep_last=2)
    assert names(tmp_path) == ["step-00000150", "step-00000200-2"]
    assert newest(tmp_path) == (200, "second")


def test_saving_a_step_again_keeps_an_equal_checkpoint(tmp_path: Path) -> None:
    path = put(tmp_path, 10, "a")
    inode = path.stat().st_ino
    assert put(tmp_path, 10, "a") == path
    assert path.stat().st_ino == inode
    assert names(tmp_path) == ["step-00000010"]


def test_saving_a_step_again_replaces_another_or_damaged_one(tmp_path: Path) -> None:
    put(tmp_path, 10, "a")
    assert put(tmp_path, 10, "b") == tmp_path / "step-00000010-2"
    assert names(tmp_path) == ["step-00000010-2"]
    (tmp_path / "step-00000010-2" / "plain").write_bytes(b"plain x" * 20)
    assert put(tmp_path, 10, "b") == tmp_path / "step-00000010-3"
    assert names(tmp_path) == ["step-00000010-3"]
    assert newest(tmp_path) == (10, "b")


def test_saving_a_step_again_beside_a_damaged_one_that_is_not_removed(tmp_path: Path) -> None:
    put(tmp_path, 10, "a")
    (tmp_path / "step-00000010" / "plain").unlink()
    assert put(tmp_path, 10, "a") == tmp_path / "step-00000010-2"
    assert newest(tmp_path) == (10, "a")


def test_exception_in_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise KeyboardInterrupt

    put(tmp_path, 10, "a")
    with pytest.raises(KeyboardInterrupt):
        save.save(tmp_path, step=20, write=interrupted, meta={}, keep_last=1)
    assert names(tmp_path) == ["step-00000010"]


def test_disk_error_of_any_writer_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(
        OutputError, match=r"cannot write the checkpoint .*: No space left on device; free some"
    ):
        save.save(tmp_path, step=20, write=full, meta={}, keep_last=1)


def full(directory: Path) -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def test_full_disk_takes_what_the_checkpoint_would_have_made_unnecessary(tmp_path: Path) -> None:
    for step in (5, 10, 20, 30):
        put(tmp_path, step, str(step), keep_last=9)
    (tmp_path / "step-00000010" / "plain").unlink()  # damaged: it does not count, and stays
    with pytest.raises(
        save.RoomMadeError, match=r"No space left.*make room, step-00000005 went before its time$"
    ):
        save.save(tmp_path, step=40, write=full, meta={}, keep_last=2, keep_too=[20])
    assert names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
    with pytest.raises(OutputError, match="No space left") as error:
        save.save(tmp_path, step=40, write=full, meta={}, keep_last=2, keep_too=[20])
    assert type(error.value) is OutputError, "there was nothing to remove"
    with pytest.raises(save.RoomMadeError, match="step-00000020 went"):
        save.save(tmp_path, step=40, write=full, meta={}, keep_last=2)
    with pytest.raises(OutputError, match="No space left"):
        save.save(tmp_path, step=40, write=full, meta={}, keep_last=1)
    assert newest(tmp_path) == (30, "30"), "the newest stays"


def test_full_disk_takes_no_checkpoint_before_one_that_has_rotted(tmp_path: Path) -> None:
    """A run that passed over a damaged one goes on from the one before, which is all that there is."""
    for step in (5, 10):
        put(tmp_path, step, str(step), keep_last=9)
    rotted = tmp_path / "step-00000010" / "plain"
    rotted.write_bytes(bytes(byte ^ 1 for byte in rotted.read_bytes()))
    for keep_last in (2, 1):
        with pytest.raises(OutputError, match="No space left"):
            save.save(tmp_path, step=15, write=full, meta={}, keep_last=keep_last)
        found = load.newest_whole(tmp_path, warn=lambda _: None)
        assert found is not None
        assert found[1].step == 5


def test_full_disk_leaves_what_is_kept_until_the_checkpoint_is_whole(tmp_path: Path) -> None:
    for step in (5, 10):
        put(tmp_path, step, str(step), keep_last=9)
    with pytest.raises(OutputError, match="No space left"):
        save.save(tmp_path, step=15, write=full, meta={}, keep_last=1, keep_until=[5])
    assert names(tmp_path) == ["step-00000005", "step-00000010"]
    save.save(tmp_path, step=15, write=lambda _: None, meta={}, keep_last=1, keep_until=[5])
    assert names(tmp_path) == ["step-00000015"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EFBIG, errno.EACCES])
def test_other_errors_take_nothing(tmp_path: Path, number: int) -> None:
    def fails(directory: Path) -> None:
        raise OSError(number, os.strerror(number))

    for step in (10, 20):
        put(tmp_path, step, str(step), keep_last=9)
    with pytest.raises(OutputError, match=re.escape(os.strerror(number))):
        save.save(tmp_path, step=30, write=fails, meta={}, keep_last=1)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_link_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "link").symlink_to("/etc/passwd")

    with pytest.raises(OutputError, match="link is not a regular file"):
        save.save(tmp_path, step=20, write=write, meta={}, keep_last=1)
    assert names(tmp_path) == []
