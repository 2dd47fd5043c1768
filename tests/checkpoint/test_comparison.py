from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain import files
from megatrain.checkpoint import comparison, format, load, save
from megatrain.errors import CheckpointError

NUM_BYTES = 1000


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of six files of ten chunks each, read by four threads, in pieces of 33 bytes."""
    monkeypatch.setattr(format, "CHUNK_BYTES", NUM_BYTES // 10)
    monkeypatch.setattr(comparison, "INLINE_BYTES", 0)
    monkeypatch.setattr(comparison, "BUFFER_BYTES", 33)
    monkeypatch.setattr(comparison, "num_readers", lambda: 4)

    def write(directory: Path) -> None:
        for number in range(6):
            files.write_bytes_durably(directory / f"file{number}", random.Random(number).randbytes(NUM_BYTES))
        files.write_bytes_durably(directory / "nothing", b"")

    return save.save(tmp_path, step=1, write=write, meta={}, keep_last=1)


def flip(file: Path, index: int) -> None:
    data = bytearray(file.read_bytes())
    data[index] ^= 1
    file.write_bytes(data)


def test_every_byte_is_counted_once(path: Path) -> None:
    passed: list[int] = []
    assert load.verify(path, passed=passed.append).step == 1
    assert passed == [100] * 60


@pytest.mark.parametrize("seed", range(20))
def test_threads_name_what_one_thread_names(path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Files and bytes at random; the first damaged chunk in the manifest's order is the one that is named."""
    chance = random.Random(seed)
    wrong = sorted({(chance.randrange(6), chance.randrange(NUM_BYTES)) for _ in range(chance.randint(1, 5))})
    for number, index in wrong:
        flip(path / f"file{number}", index)
    told = []
    for threads in (4, 1):
        monkeypatch.setattr(comparison, "num_readers", lambda threads=threads: threads)
        with pytest.raises(load.DamagedError) as caught:
            load.verify(path)
        told.append(str(caught.value))
    number, begin = wrong[0][0], wrong[0][1] // 100 * 100
    assert f"file{number} has wrong contents between bytes {begin} and {begin + 100}" in told[0]
    assert told[0] == told[1]


class _Reads(files.FileCalls):
    """Counts reads that run at once, and their memory; `before` may sleep or raise."""

    def __init__(self, before: Callable[[str, int], None]) -> None:
        self._before, self._lock, self._names = before, threading.Lock(), dict[int, str]()
        self.now = self.most = 0
        self.buffers: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        self._names[descriptor] = path.name
        return descriptor

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.buffers.add(id(buffer.obj))
        try:
            self._before(self._names[descriptor], offset)
            return super().read_into(descriptor, buffer, offset)
        finally:
            with self._lock:
                self.now -= 1


def test_the_first_error_is_told_though_a_later_one_comes_earlier(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(path / "file0", 950)
    later_failed = threading.Event()

    def before(name: str, offset: int) -> None:
        if name == "file1":
            later_failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if name == "file0" and offset >= 900:
            assert later_failed.wait(10)

    monkeypatch.setattr(files, "system", _Reads(before))
    with pytest.raises(load.DamagedError, match="file0 has wrong contents between bytes 900 and 1000"):
        load.verify(path)


def test_no_more_buffers_than_threads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = _Reads(lambda name, offset: time.sleep(0.0005))
    monkeypatch.setattr(files, "system", system)
    load.verify(path)
    assert system.most == 4
    assert len(system.buffers) == 4


@pytest.mark.parametrize(("number", "is_damage"), [(errno.EIO, True), (errno.ENOMEM, False)])
def test_a_read_that_fails_names_its_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_damage: bool
) -> None:
    def before(name: str, offset: int) -> None:
        if name == "file3":
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "system", _Reads(before))
    with pytest.raises(CheckpointError, match=f"file3.*{os.strerror(number)}") as caught:
        load.verify(path)
    assert isinstance(caught.value, load.DamagedError) == is_damage


def test_a_file_that_shrinks_while_it_is_read_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(name: str, offset: int) -> None:
        if name == "file4":
            os.truncate(path / name, 350)

    monkeypatch.setattr(files, "system", _Reads(before))
    with pytest.raises(load.DamagedError, match="file4 has wrong contents between bytes 300 and 400"):
        load.verify(path)
