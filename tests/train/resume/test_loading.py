"""A resume reads a checkpoint once: damage that is found in the middle of a load leads to the one before."""

from __future__ import annotations

import gc
import logging
import re
import shutil
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain import files
from megatrain.checkpoint import comparison, format
from megatrain.checkpoint.load import DamagedError
from megatrain.config import Config
from megatrain.errors import CheckpointError
from megatrain.model.weights import reading
from megatrain.store.state import HostState
from megatrain.train import beginning as train_beginning
from megatrain.train.beginning import Beginning
from megatrain.train.loop import train
from megatrain.train.records.directory import RunDirectory
from tests.train.project import (
    make_config,
    train_until,
    write_corpus,
    write_model_config,
    write_model_with_experts,
)
from tests.train.test_loop import assert_same_runs

CHUNK = 4096
NEWEST = "run/checkpoints/step-00000008"
STATE = "state/block-00001.safetensors"

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"train": {"precision": "bf16"}},
    "int8": {"train": {"precision": "bf16"}, "optim": {"state": "int8"}},
    "some": {"train": {"only": ["*.mlp.*"]}},
    "experts": {"train": {"precision": "bf16"}},
    "adapters": {"lora": {"r": 4}, "model": {"init": "pretrained"}},
    "resident": {
        "train": {"precision": "bf16", "device": "emulated"},
        "memory": {"resident_blocks": 2, "mirror_resident": False},
    },
}
DAMAGED = ("fp32", "bf16")


def config_of(root: Path, kind: str, out: str = "run", **sections: Any) -> Config:
    if not (root / "model").exists():
        (root / "model").mkdir()
        write_corpus(root / "corpus.txt")
        if kind == "experts":
            write_model_with_experts(root / "model")
        else:
            write_model_config(root / "model")
        if kind == "adapters":
            train(make_config(root, "base", train={"steps": 1}, optim={"warmup_steps": 0}))
            shutil.rmtree(root / "model")
            (root / "base/hf").rename(root / "model")
    asked: dict[str, Any] = {"train": {"steps": 9}, "checkpoint": {"every": 4}, "log": {"report": False}}
    for name, values in {**KINDS[kind], **sections}.items():
        asked[name] = {**asked.get(name, {}), **values}
    return make_config(root, out, **asked)


@pytest.fixture(scope="module")
def small_chunks() -> Iterator[None]:
    """Checkpoints of many chunks, which four threads read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format, "CHUNK_BYTES", CHUNK)
        patch.setattr(comparison, "INLINE_BYTES", 0)
        patch.setattr(comparison, "num_readers", lambda: 4)
        yield


Stopped = tuple[str, Path, Path]
"""A kind of run, a directory in which it was stopped in step 9, and one in which it went on."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_chunks: None) -> dict[str, Stopped]:
    """The runs that are made so far, by kind."""
    return {}


@pytest.fixture
def stopped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, runs: dict[str, Stopped]
) -> Stopped:
    kind = request.param
    if kind not in runs:
        root, whole = (tmp_path_factory.mktemp(name) for name in ("stopped", "whole"))
        train_until(config_of(root, kind), 8)
        train(config_of(whole, kind))
        runs[kind] = kind, root, whole
    return runs[kind]


def flip(file: Path, index: int) -> None:
    data = bytearray(file.read_bytes())
    data[index] ^= 4
    file.write_bytes(data)


def told_of_damage(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "damaged" in (text := record.getMessage())]


class Reads(files.FileCalls):
    """Counts the bytes that are read of each file of a checkpoint."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        self.num_bytes: Counter[str] = Counter()

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        self._names[descriptor] = str(path)
        return descriptor

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        count = super().read_into(descriptor, buffer, offset)
        with self._lock:
            self.num_bytes[self._names[descriptor]] += count
        return count


class Headers:
    """A mapped file of tensors of which nothing but the header may be read."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.keys, self.get_slice = handle.keys, handle.get_slice

    def __enter__(self) -> Headers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.__exit__(*exception)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stopped", KINDS, indirect=True)
def test_a_resume_reads_each_byte_of_a_large_file_once(
    stopped: Stopped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, root, whole = stopped
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    checkpoint = tmp_path / NEWEST
    large = [*checkpoint.glob("state/*.safetensors"), *checkpoint.glob("model*.safetensors")]
    assert len(large) > 2
    sizes = {str(file): file.stat().st_size for file in large}
    headers = {str(file): 8 + int.from_bytes(file.read_bytes()[:8], "little") for file in large}
    reads = Reads()
    monkeypatch.setattr(files, "system", reads)
    opened = reading.open_safetensors
    monkeypatch.setattr(
        reading,
        "open_safetensors",
        lambda file: Headers(opened(file)) if str(file) in sizes else opened(file),
    )
    train(config_of(tmp_path, kind))
    assert max(sizes.values()) > 5 * CHUNK
    for file, size in sizes.items():
        assert reads.num_bytes[file] == size + headers[file], file
    assert_same_runs(tmp_path / "run", whole / "run")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stopped", DAMAGED, indirect=True)
@pytest.mark.parametrize("where", ["header", "name", "first", "middle", "last"])
@pytest.mark.parametrize("name", [STATE, "model.safetensors"])
def test_damage_found_in_the_middle_of_a_load_leads_to_the_checkpoint_before(
    stopped: Stopped,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    where: str,
) -> None:
    """With one warning, the same bits, and the memory of the first attempt let go of before the second."""
    kind, root, whole = stopped
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    file = tmp_path / NEWEST / name
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    index = {
        "header": 3,
        "name": data.index(b"weight"),
        "first": start,
        "middle": (start + len(data)) // 2,
        "last": len(data) - 1,
    }[where]
    flip(file, index)
    states: list[weakref.ref[HostState]] = []
    alive: list[int] = []
    make = HostState.__init__

    def noted(self: HostState, *args: Any, **options: Any) -> None:
        alive.append(sum(each() is not None for each in states))
        states.append(weakref.ref(self))
        make(self, *args, **options)

    monkeypatch.setattr(HostState, "__init__", noted)
    gc.collect()
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        train(config_of(tmp_path, kind))
    begin = index // CHUNK * CHUNK
    end = min(begin + CHUNK, len(data))
    assert told_of_damage(caplog) == [
        f"checkpoint {tmp_path / NEWEST} is damaged: {name} has wrong contents between bytes {begin} and "
        f"{end}; trying the one before it, step-00000004"
    ]
    assert not any(alive)
    assert_same_runs(tmp_path / "run", whole / "run")


@pytest.mark.parametrize("stopped", ["bf16"], indirect=True)
def test_every_damaged_checkpoint_is_told_once_and_none_that_is_whole_is_an_error(
    stopped: Stopped, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest lacks a file, the one before it proves damaged as it is loaded: no other is there."""
    kind, root, _ = stopped
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    (tmp_path / NEWEST / STATE).unlink()
    flip(tmp_path / "run/checkpoints/step-00000004" / STATE, -1)
    before = sorted(tmp_path.rglob("*"))
    words = (
        r"is whole: step-00000008 \(state/block-00001.safetensors is missing\), "
        r"step-00000004 \(state/block-00001.safetensors has wrong contents"
    )
    with (
        caplog.at_level(logging.WARNING, logger="megatrain"),
        pytest.raises(CheckpointError, match=words),
    ):
        train(config_of(tmp_path, kind))
    assert len(told_of_damage(caplog)) == 1
    assert re.search("is missing; trying the one before it, step-00000004", caplog.text)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("stopped", ["bf16"], indirect=True)
@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.parametrize("name", [STATE, "model.safetensors"])
def test_a_named_checkpoint_that_is_damaged_is_one_error(
    stopped: Stopped, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, index: int
) -> None:
    kind, root, _ = stopped
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    path = tmp_path / NEWEST
    flip(path / name, index)
    with pytest.raises(DamagedError, match=f"checkpoint {re.escape(str(path))} is damaged: {name} has wrong"):
        train(config_of(tmp_path, kind, "other"), resume=str(path))
    assert not told_of_damage(caplog)
    assert not list((tmp_path / "other").glob("*/*"))


@pytest.mark.parametrize("stopped", ["bf16"], indirect=True)
def test_a_finished_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(
    stopped: Stopped, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, _, whole = stopped
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    newest = "run/checkpoints/step-00000009"
    flip(tmp_path / newest / STATE, -1)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        train(config_of(tmp_path, kind))
    assert f"checkpoint {tmp_path / newest} is damaged: {STATE} has wrong contents" in caplog.text
    assert_same_runs(tmp_path / "run", whole / "run")


@pytest.mark.parametrize("name", [STATE, pytest.param("model.safetensors", marks=pytest.mark.parity)])
def test_state_goes_to_drives_from_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """To drives that hold nothing; what the first attempt has put there is not in the way."""
    monkeypatch.setattr(format, "CHUNK_BYTES", CHUNK)
    memory: dict[str, Any] = {"activations": "recompute", "commit_every": None}
    tiers = {"tiers": {"ram": 540_000, "nvme": [str(tmp_path / "drive0"), str(tmp_path / "drive1")]}}
    settings: dict[str, Any] = {
        "train": {"steps": 9, "precision": "bf16", "device": "emulated"},
        "checkpoint": {"every": 4},
    }
    whole = make_config(tmp_path, "whole", memory=memory, **settings)
    train(whole)
    config = make_config(tmp_path, memory={**memory, **tiers}, **settings)
    train_until(config, 8)
    for drive in (tmp_path / "drive0", tmp_path / "drive1"):
        shutil.rmtree(drive)
    flip(tmp_path / NEWEST / name, -1)
    with caplog.at_level(logging.DEBUG, logger="megatrain"):
        train(config)
    assert len(told_of_damage(caplog)) == 1
    assert re.search(r"going on from step 4", caplog.text)
    assert re.search(r"remainder and moments of (\d) of \1 blocks on drives", caplog.text)
    assert_same_runs(tmp_path / "run", tmp_path / "whole")
    assert list((tmp_path / "drive0").iterdir()) == list((tmp_path / "drive1").iterdir()) == []


def test_a_checkpoint_is_compared_before_it_overwrites_what_drives_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit of step 6 is older than the damaged checkpoint of step 8, and newer than that of step 4."""
    tiers = {"ram": 540_000, "nvme": [str(tmp_path / "drive0"), str(tmp_path / "drive1")]}
    config = make_config(
        tmp_path,
        memory={"activations": "recompute", "commit_every": 3, "tiers": tiers},
        train={"steps": 9, "precision": "bf16", "device": "emulated"},
        checkpoint={"every": 4},
    )
    train_until(config, 8)
    flip(tmp_path / NEWEST / STATE, -1)
    with caplog.at_level(logging.DEBUG, logger="megatrain"):
        train(config)
    assert len(told_of_damage(caplog)) == 1
    assert re.search(r"going on from step 6", caplog.text)


@pytest.mark.parametrize("stopped", ["bf16"], indirect=True)
@pytest.mark.parametrize(
    ("held", "num_ranks", "is_later"),
    [([[-1, -1]], 1, True), ([[-1, -1]], 2, False), ([[3, -1]], 1, False), ([[-1, 3]], 1, False)],
)
def test_who_compares_a_checkpoint_as_it_is_loaded(
    stopped: Stopped,
    monkeypatch: pytest.MonkeyPatch,
    held: list[list[int]],
    num_ranks: int,
    is_later: bool,
) -> None:
    """A single process that does not overwrite what drives hold; others read all of it when it is found."""
    kind, root, _ = stopped
    config = config_of(root, kind)
    reads = Reads()
    monkeypatch.setattr(files, "system", reads)
    monkeypatch.setattr(
        train_beginning, "with_shards", lambda config, *_: config
    )  # made by one, it is of one
    beginning = Beginning(config, RunDirectory(Path(config.out)), str(root / NEWEST), held, num_ranks)
    assert beginning.find() is not None
    assert beginning.reader is not None
    large = {str(file) for file in (root / NEWEST).rglob("*.safetensors")}
    assert {str(root / NEWEST / name) for name in beginning.reader.later} == (large if is_later else set())
    for file in (file for file in (root / NEWEST).rglob("*") if file.is_file()):
        expected = 0 if is_later and str(file) in large else file.stat().st_size
        if file.name != format.MANIFEST_NAME:
            assert reads.num_bytes[str(file)] == expected, file
