"""Under a run that loses its directory the state is saved, and a sentence says where."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from megatrain import files
from megatrain.checkpoint.load import find, verify
from megatrain.errors import OutputError, warn_once
from megatrain.filesystems import filesystem_of, filesystem_of_device, named_filesystem
from megatrain.store.drives.record import RECORD_NAME
from megatrain.train.loop import train
from megatrain.train.records import lock as lock_module
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.json_lines import JsonLines, read_rows
from tests.train.project import make_config

SETTINGS: dict[str, Any] = {
    "train": {"steps": 6},
    "optim": {"warmup_steps": 0},
    "checkpoint": {"every": 2, "keep_last": 2},
}


class Disturber(TrainerCallback):
    """Does something to the run directory after a step."""

    def __init__(self, step: int, disturb: Callable[[], object]) -> None:
        self.step, self.disturb = step, disturb

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self.step:
            self.disturb()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of a run that nobody disturbed."""
    root = tmp_path_factory.mktemp("whole")
    train(make_config(root, **SETTINGS))
    return load_file(root / "run/hf/model.safetensors")


def disturbed(root: Path, step: int, disturb: Callable[[], object]) -> str:
    """Train until a run ends because of its directory; return what it says."""
    with pytest.raises(OutputError) as caught:
        train(make_config(root, **SETTINGS), callbacks=[Disturber(step, disturb)])
    assert caught.value.exit_code == 2
    return str(caught.value)


def stopped(root: Path, step: int) -> None:
    """Train until a callback stops the run after a step, which is saved."""

    class Stopper(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop = state.global_step == step

    with pytest.raises(SystemExit, match="75"):
        train(make_config(root, **SETTINGS), callbacks=[Stopper()])


def require_same(run: Path, weights: dict[str, Any]) -> None:
    """Hold the model of a run that went on against that of the other one, bit for bit."""
    found = load_file(run / "hf/model.safetensors")
    assert found.keys() == weights.keys()
    assert all(found[name].equal(weights[name]) for name in weights)


def test_a_moved_directory_has_the_state_and_goes_on(tmp_path: Path, weights: dict[str, Any]) -> None:
    run, moved = tmp_path / "run", tmp_path / "kept/elsewhere"
    moved.parent.mkdir()
    said = disturbed(tmp_path, 3, lambda: run.rename(moved))
    assert f"{run} was moved to {moved} while the run trained" in said
    assert f"--out {moved}" in said
    assert not run.exists()  # nothing is left behind, so that the path may be used again
    assert verify(find(moved / "checkpoints")[0]).step == 4
    assert [row["event"] for row in read_rows(moved / "events.jsonl")][-1] == "error"
    train(make_config(tmp_path, "kept/elsewhere", **SETTINGS))
    require_same(moved, weights)
    assert [row["step"] for row in read_rows(moved / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_moved_run_with_state_on_drives_goes_on_under_its_new_name(tmp_path: Path) -> None:
    """State on drives belongs to a name: it goes when a checkpoint has all of it."""
    memory = {"activations": "recompute", "fragments": False}
    settings = {**SETTINGS, "train": {"steps": 6, "precision": "bf16", "device": "emulated"}}
    train(make_config(tmp_path, "whole", **settings, memory=memory))
    drive = tmp_path / "drive"
    settings["memory"] = {**memory, "tiers": {"ram": 540_000, "nvme": [str(drive)]}}
    run, moved = tmp_path / "run", tmp_path / "moved"

    def move() -> None:
        assert (drive / RECORD_NAME).exists()
        run.rename(moved)

    with pytest.raises(OutputError, match=f"--out {moved}"):
        train(make_config(tmp_path, **settings), callbacks=[Disturber(3, move)])
    assert list(drive.iterdir()) == []
    train(make_config(tmp_path, "moved", **settings))
    require_same(moved, load_file(tmp_path / "whole/hf/model.safetensors"))


def test_a_removed_directory_is_made_again_and_goes_on(tmp_path: Path, weights: dict[str, Any]) -> None:
    run = tmp_path / "run"
    said = disturbed(tmp_path, 3, lambda: shutil.rmtree(run))
    assert f"{run} was removed while the run trained; it was made again" in said
    assert [path.name for path in find(run / "checkpoints")] == ["step-00000004"]
    assert run.stat().st_mode & 0o777 == 0o700
    train(make_config(tmp_path, **SETTINGS))  # the same command
    require_same(run, weights)


def test_settings_that_are_removed_are_written_again(
    tmp_path: Path, weights: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings = tmp_path / "run/config.yaml"
    train(make_config(tmp_path, **SETTINGS), callbacks=[Disturber(3, settings.unlink)])
    require_same(tmp_path / "run", weights)
    assert f"{settings} was removed; it is written again" in caplog.text
    assert settings.stat().st_mode & 0o777 == 0o600


def test_what_stands_in_its_place_is_left_alone(tmp_path: Path, weights: dict[str, Any]) -> None:
    run = tmp_path / "run"

    def replace() -> None:
        shutil.rmtree(run)
        run.mkdir()
        (run / "notes.txt").write_text("mine")

    said = disturbed(tmp_path, 3, replace)
    assert f"the run is saved in {run}-2 and has ended" in said
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    train(make_config(tmp_path, "run-2", **SETTINGS))
    require_same(tmp_path / "run-2", weights)


def test_a_directory_that_is_moved_before_the_export_is_exported(
    tmp_path: Path, weights: dict[str, Any]
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"

    class Late(TrainerCallback):
        def on_train_end(self, *_: Any, **__: Any) -> None:
            run.rename(moved)

    with pytest.raises(OutputError, match=f"was moved to {moved}"):
        train(make_config(tmp_path, **SETTINGS), callbacks=[Late()])
    require_same(moved, weights)
    assert not run.exists()


def test_checkpoints_without_settings_are_gone_on_with(tmp_path: Path, weights: dict[str, Any]) -> None:
    """What an older version left at the path of a directory that was moved."""
    stopped(tmp_path, 4)
    run = tmp_path / "run"
    for path in run.iterdir():
        if path.name != "checkpoints":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(OutputError, match="holds a run already"):
        train(make_config(tmp_path, **SETTINGS), resume="no")
    train(make_config(tmp_path, **SETTINGS))
    require_same(run, weights)


@pytest.mark.parametrize(
    "names", [("checkpoints/best.pt",), ("checkpoints/step-00000001", "notes"), ("hf/a",)]
)
def test_a_directory_of_somebody_else_is_still_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(OutputError, match="not empty and is not a run of megatrain"):
        RunDirectory(tmp_path / "run").check()


def test_a_log_that_is_removed_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "logs/metrics.jsonl"
    file.parent.mkdir()
    with JsonLines(file) as log:
        log.append({"step": 1})
        file.unlink()
        log.append({"step": 2})
        log.append({"step": 3})
        assert [row["step"] for row in read_rows(file)] == [2, 3]
        assert caplog.text.count("its rows go on in a file of that name") == 1
        shutil.rmtree(file.parent)
        file.parent.mkdir()  # of somebody else
        log.append({"step": 4})
        assert list(file.parent.iterdir()) == []
    assert "The run goes on without the rows that cannot be written" in caplog.text


def refusing(number: int, is_refused: Callable[..., bool]) -> type[files.FileCalls]:
    """Return calls of a file system that refuses some renames."""

    class Calls(files.FileCalls):
        def rename(self, source: Path, target: Path) -> None:
            if is_refused(source, target):
                raise OSError(number, os.strerror(number))
            super().rename(source, target)

        def fsync(self, descriptor: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    return Calls


@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENOTSUP, errno.ENOSYS])
def test_a_run_on_a_file_system_that_replaces_no_file(
    tmp_path: Path,
    weights: dict[str, Any],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It trains, goes on, and names what the file system lacks, once each."""
    monkeypatch.setattr(files, "system", refusing(number, lambda source, target: target.is_file())())
    warn_once.cache_clear()
    stopped(tmp_path, 3)
    train(make_config(tmp_path, **SETTINGS))
    require_same(tmp_path / "run", weights)
    named = named_filesystem(tmp_path)
    assert caplog.text.count(f"on the file system {named} no file can take another's name at once") == 1
    assert caplog.text.count(f"the file system {named} cannot make names durable") == 1
    assert not [path for path in (tmp_path / "run").iterdir() if ".tmp-" in path.name]


@pytest.mark.parametrize("ends", [OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()])
def test_a_file_that_cannot_be_replaced_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException
) -> None:
    """The new file gets no name when the old one has given up its own."""
    file = tmp_path / "config.yaml"
    files.write_bytes_durably(file, b"old")

    class Calls(files.FileCalls):
        num_renames = 0

        def rename(self, source: Path, target: Path) -> None:
            self.num_renames += 1
            if self.num_renames == 1:
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
            if self.num_renames == 3:
                raise ends
            super().rename(source, target)

    monkeypatch.setattr(files, "system", Calls())
    with pytest.raises((OutputError, KeyboardInterrupt)):
        files.write_bytes_durably(file, b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"config.yaml": b"old"}


def test_locks_that_other_machines_do_not_see_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(lock_module, "filesystem_of", lambda path: "nfs4")
    with RunDirectory(tmp_path / "run").lock():
        assert RunDirectory(tmp_path / "run").is_in_use
    assert "other machines may not see locks of the file system" in caplog.text


def test_file_systems_are_known_by_their_devices(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    lines = (
        "36 35 98:0 / /mnt rw,noatime master:1 - ext3 /dev/root rw\n",
        "37 35 0:52 / /home rw shared:7 - nfs4 host:/home rw,vers=4.2\n",
    )
    (tmp_path / "proc/self/mountinfo").write_text("".join(lines))
    assert filesystem_of_device((0, 52), tmp_path) == "nfs4"
    assert filesystem_of_device((98, 0), tmp_path) == "ext3"
    assert filesystem_of_device((1, 1), tmp_path) == "unknown"
    assert filesystem_of(tmp_path / "nothing") == "unknown"
    number = os.stat(tmp_path).st_dev
    line = f"36 35 {os.major(number)}:{os.minor(number)} / /data rw - xfs /dev/x rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(line)
    assert named_filesystem(tmp_path, tmp_path) == "xfs at /data"
