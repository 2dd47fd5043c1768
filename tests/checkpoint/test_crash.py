"""Whatever kills a save, and wherever, a whole checkpoint is there afterwards."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain import files
from megatrain.checkpoint import background, format, load
from megatrain.errors import OutputError
from tests.checkpoint.faults import MORE_BEHIND, SCENARIOS, Failing, Watched, newest, put
from tests.checkpoint.powercut import ForgetfulSystem, InTurn

Event = tuple[str, Path]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Thousands of small files: in memory where that can be, and gone after the test."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "system", Watched())


class Recorded(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def before(self, call: str, path: Path) -> None:
        self.events.append((call, path))


def check_order(root: Path, events: list[Event]) -> None:
    """Assert that everything is on the disk before what relies on it is done."""
    manifest = next(i for i, (_, path) in enumerate(events) if "MANIFEST.json.tmp" in path.name)
    commit = next(i for i, event in enumerate(events) if event[0] == "rename" and event[1].parent == root)
    temporary = events[commit][1]
    names = {path for call, path in events[:manifest] if call == "read" and temporary in path.parents}
    assert len(names) == 3
    inner = {parent for name in names for parent in name.parents if temporary in (parent, *parent.parents)}
    written = max(i for i, (call, _) in enumerate(events[:manifest]) if call in ("write", "create"))
    for path in names | inner:
        assert ("fsync", path) in events[written:manifest], f"{path} before the manifest"
    sealed = events[manifest:commit]
    calls = [call for call, path in sealed if "MANIFEST" in path.name]
    assert calls == ["create", "write", "fsync", "close", "rename"]
    assert ("fsync", temporary) in sealed[sealed.index(("rename", sealed[0][1])) :]
    trash = next(i for i, event in enumerate(events) if event[0] == "rename" and i > commit)
    assert ("fsync", root) in events[commit:trash], "the commit before the first removal"
    assert not any(call in ("unlink", "rmdir") for call, _ in events[commit:trash])
    removed = next(i for i, (call, path) in enumerate(events) if call == "unlink" and i > trash)
    assert events[removed][1].name == "MANIFEST.json"
    assert ("fsync", root) in events[trash:removed], "the removal of a name before that of its files"
    later = next(i for i, (call, _) in enumerate(events) if call == "unlink" and i > removed)
    assert ("fsync", events[removed][1].parent) in events[removed:later], (
        "the manifest before the other files"
    )


def record_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    put(root, 10, "a")
    system = Recorded()
    monkeypatch.setattr(files, "system", system)
    put(root, 20, "b", keep_last=1)
    return system.events


def test_all_is_on_the_disk_before_what_relies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_order(tmp_path, record_save(tmp_path, monkeypatch))


def test_every_fsync_is_needed_by_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving out any one turns the check red, but for the two that `write` did for its durable file."""
    events = record_save(tmp_path, monkeypatch)
    fsyncs = [i for i, (call, _) in enumerate(events) if call == "fsync"]
    in_write = fsyncs[:2]
    assert events[in_write[0]][1].name.startswith(".weights")
    for index in fsyncs[2:]:
        with pytest.raises(AssertionError):
            check_order(tmp_path, events[:index] + events[index + 1 :])
    assert len(fsyncs) - 2 == 10


def test_kill_at_every_call_leaves_old_or_new(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.killing", str(tmp_path)]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    kills = [json.loads(line) for line in run.stdout.splitlines()]
    states = set()
    for kill in kills:
        scenario, root = SCENARIOS[kill["scenario"]], Path(kill["root"])
        states.add((kill["scenario"], newest(root)))
        scenario.check_afterwards(root)
    assert len(kills) > 400
    # Both outcomes were seen: kills came on both sides of the commit.
    assert states == {(name, state) for name, item in SCENARIOS.items() for state in (item.old, item.new)}


@pytest.mark.parametrize(
    "name", ["only", "retention", "again, other", "behind", "behind, retention, in parallel"]
)
def test_power_cut_at_every_call_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    states, bad = power_cuts(tmp_path, monkeypatch, name, num_states=8)
    assert bad == 0
    assert states > 200


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [10_000])
def test_every_state_that_a_power_cut_leaves_is_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of so many in all; each save that is cut has files of several chunks where they are written behind."""
    monkeypatch.setattr(format, "CHUNK_BYTES", 64)
    monkeypatch.setattr(background, "CHUNK_BYTES", 64)
    names = [*SCENARIOS, *MORE_BEHIND]
    found = dict.fromkeys(names, 0)
    for seed in itertools.count():
        for name in names:
            run = tmp_path / f"{seed} {name}"
            run.mkdir()
            with monkeypatch.context() as patch:
                states, bad = power_cuts(run, patch, name, num_states=4, seed=seed)
            assert bad == 0, (seed, name)
            found[name] += states
            shutil.rmtree(run)
        if sum(found.values()) >= number:
            break
    print(f"{sum(found.values())} states: {found}")
    assert min(found.values()) > number // 30


def test_power_cut_test_sees_a_missing_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is strict enough: without the fsync of a file, the manifest or the commit there is a loss."""
    for index, kind in ((2, "deep/moments"), (7, "MANIFEST"), (8, "directory"), (9, "commit")):
        with monkeypatch.context() as patch:
            run = tmp_path / str(index)
            run.mkdir()
            _, bad = power_cuts(run, patch, "only", num_states=40, dropped_fsync=index)
        assert bad > 0, kind


@pytest.mark.parametrize("name", ["weights.safetensors", "moments", "deep", "checkpoints"])
def test_power_cut_test_sees_what_a_save_in_the_background_does_not_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, bad = power_cuts(tmp_path, monkeypatch, "behind", num_states=40, dropped_name=name)
    assert bad > 0


@pytest.mark.parametrize("kind", [".MANIFEST", ".tmp-", "checkpoints"])
def test_single_fsyncs_of_a_save_in_the_background_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Of the manifest, the directory that has it, and the commit: one left out loses something."""
    calls = Recorded()
    scenario = SCENARIOS["behind"]
    scenario.prepare(tmp_path / "listed")
    with monkeypatch.context() as patch:
        patch.setattr(files, "system", calls)
        scenario.run(tmp_path / "listed")
    fsyncs = [path for call, path in calls.events if call == "fsync"]
    found = [
        index
        for index, path in enumerate(fsyncs)
        if (path.name if path.name != "listed" else "checkpoints").startswith(kind)
    ]
    lost = 0
    for index in found[-1:] if kind == ".tmp-" else found:
        run = tmp_path / str(index)
        run.mkdir()
        with monkeypatch.context() as patch:
            lost += power_cuts(run, patch, "behind", num_states=40, dropped_fsync=index)[1] > 0
    assert lost == (len(found) if kind == ".MANIFEST" else 1)


def power_cuts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    num_states: int,
    seed: int = 0,
    dropped_fsync: int = -1,
    dropped_name: str = "",
) -> tuple[int, int]:
    """Cut the power `num_states` times after every call; count the states, and those without old or new."""
    scenario, chance = {**SCENARIOS, **MORE_BEHIND}[name], random.Random(seed)
    root, copy = tmp_path / "checkpoints", tmp_path / "copy"
    root.mkdir()
    scenario.prepare(root)
    real = files.system
    system = ForgetfulSystem(root, dropped_fsync=dropped_fsync, dropped_name=dropped_name)
    states = bad = 0
    calls = InTurn(system, real)

    def look() -> None:
        nonlocal states, bad
        if len(system.fsyncs) <= dropped_fsync:
            return
        with calls.looking():
            for _ in range(num_states):
                system.after_power_cut(chance, copy)
                states += 1
                try:
                    bad += newest(copy) not in (scenario.old, scenario.new)
                except (AssertionError, load.CheckpointError):
                    bad += 1
                shutil.rmtree(copy)

    system.after_call = look
    monkeypatch.setattr(files, "system", calls)
    scenario.run(root)
    return states, bad


@pytest.mark.parametrize("name", ["first", "retention", "again, equal", "again, other", "behind"])
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
def test_error_at_every_call_is_one_sentence_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, for_ever: bool
) -> None:
    scenario, template = SCENARIOS[name], tmp_path / "template"
    template.mkdir()
    scenario.prepare(template / "checkpoints")
    for at in itertools.count():
        root = shutil.copytree(template, tmp_path / str(at)) / "checkpoints"
        number = (errno.ENOSPC, errno.EIO, errno.EACCES)[at % 3]
        system = Failing(at, number, for_ever=for_ever)
        with monkeypatch.context() as patch:
            patch.setattr(files, "system", system)
            try:
                scenario.run(root)
                message = ""
            except OutputError as error:
                message = str(error)
        if message:
            assert "\n" not in message
            assert os.strerror(number) in message
            assert str(root.parent) in message
            assert "Errno" not in message
        else:
            # Only looking at an old checkpoint may fail without an end: it is then left where it is.
            looked_at = [inner for call, inner in system.failed if call in ("open", "read", "close")]
            assert len(looked_at) == len(system.failed)
            assert all(inner.relative_to(root).parts[0].startswith("step-") for inner in looked_at)
        scenario.check_afterwards(root)
        if not system.failed:
            break
    assert at > 40


def test_error_leaves_no_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 10, "a")
    with monkeypatch.context() as patch:
        patch.setattr(files, "system", Failing(6, errno.ENOSPC))
        with pytest.raises(
            OutputError, match=r"cannot write .*: No space left on device; free some space there"
        ):
            put(tmp_path, 20, "b")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
