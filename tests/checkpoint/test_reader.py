"""Tensors of a checkpoint are read once, and nothing of a chunk is handed out that is not what was saved."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain import files
from megatrain.checkpoint import comparison, format, load, read_ahead, save
from megatrain.checkpoint.reader import CheckpointReader, Piece, Tensors
from megatrain.errors import CheckpointError

CHUNK = 8192
NAMES = ("a.safetensors", "state/b.safetensors")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of two files of tensors, of five chunks each, which four threads read."""
    monkeypatch.setattr(format, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(comparison, "INLINE_BYTES", 0)
    monkeypatch.setattr(comparison, "num_readers", lambda: 4)

    def write(directory: Path) -> None:
        (directory / "state").mkdir()
        for seed, name in enumerate(NAMES):
            chance = torch.Generator().manual_seed(seed)
            tensors = {f"t{number}": torch.randn(700 + 613 * number, generator=chance) for number in range(5)}
            tensors["half"] = torch.randn(33, 3, generator=chance).bfloat16()
            tensors["none"] = torch.zeros(0)
            save_file(tensors, directory / name)
        files.write_bytes_durably(directory / "small", b"small")

    return save.save(tmp_path, step=1, write=write, meta={}, keep_last=1)


def reader_of(path: Path) -> CheckpointReader:
    manifest = load.verify(path, is_later=lambda name: name in NAMES)
    return CheckpointReader(path, manifest, NAMES)


def all_pieces(reader: CheckpointReader) -> dict[tuple[str, str], Piece]:
    return {
        (name, key): Piece(name, place.begin, np.zeros(place.num_bytes, np.uint8))
        for name in NAMES
        for key, place in reader.places(name).items()
    }


class Reads(files.FileCalls):
    """Counts what is read of each file, and how; `before` may raise."""

    def __init__(self, before: Callable[[str, int], None] = lambda name, flags: None) -> None:
        self._before, self._lock = before, threading.Lock()
        self._open: dict[int, tuple[str, int]] = {}
        self.num_bytes: Counter[str] = Counter()
        self.buffers: set[int] = set()
        self.flags: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        self._open[descriptor] = path.name, flags
        self.flags.add(flags)
        return descriptor

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        self._before(*self._open[descriptor])
        count = super().read_into(descriptor, buffer, offset)
        with self._lock:
            self.num_bytes[self._open[descriptor][0]] += count
            self.buffers.add(id(buffer.obj))
        return count


def flip(file: Path, index: int) -> None:
    data = bytearray(file.read_bytes())
    data[index] ^= 1
    file.write_bytes(data)


def header_bytes(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_every_byte_is_read_once_and_arrives(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads()
    monkeypatch.setattr(files, "system", reads)
    reader = reader_of(path)
    assert not set(reads.num_bytes) & {"a.safetensors", "b.safetensors"}
    pieces = all_pieces(reader)
    reader.copy(pieces.values())
    reader.finish()
    for name in NAMES:
        file = path / name
        assert reads.num_bytes[file.name] == file.stat().st_size + header_bytes(file)
        for key, tensor in load_file(file).items():
            place, piece = reader.places(name)[key], pieces[name, key]
            assert (getattr(torch, place.dtype), place.shape) == (tensor.dtype, tuple(tensor.shape))
            assert bytes(piece.target) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert len(reads.buffers) <= 4 + 2 * len(NAMES) + 2  # those of threads, of two headers, of small files


@pytest.mark.parametrize("seed", range(10))
def test_parts_of_tensors_in_any_order_arrive(path: Path, seed: int) -> None:
    chance, reader = random.Random(seed), reader_of(path)
    pieces = []
    for _ in range(30):
        name = chance.choice(NAMES)
        size = (path / name).stat().st_size
        begin = chance.randrange(size)
        num_bytes = chance.randint(0, min(3 * CHUNK, size - begin))
        pieces.append(Piece(name, begin, np.zeros(num_bytes, np.uint8)))
    reader.copy(pieces)
    for piece in pieces:
        expected = (path / piece.name).read_bytes()[piece.begin : piece.begin + piece.target.size]
        assert bytes(piece.target) == expected
    reader.finish()
    assert reader.is_done


@pytest.mark.parametrize("seed", range(20))
def test_nothing_of_a_damaged_chunk_is_handed_out(path: Path, seed: int) -> None:
    """A flip anywhere: where the tensors of its chunk go, that chunk leaves the zeros that were there."""
    chance = random.Random(seed)
    name = chance.choice(NAMES)
    size = (path / name).stat().st_size
    # the last chunks too
    index = chance.choice([chance.randrange(header_bytes(path / name), size), size - 1])
    reader = reader_of(path)
    pieces = all_pieces(reader)
    flip(path / name, index)
    begin = index // CHUNK * CHUNK
    words = f"{Path(name).name} has wrong contents between bytes {begin} and {min(begin + CHUNK, size)}"
    with pytest.raises(load.DamagedError, match=words) as caught:
        reader.copy(pieces.values())
    assert caught.value.path == path
    for (where, _), piece in pieces.items():
        first, last = max(begin, piece.begin), min(begin + CHUNK, piece.begin + piece.target.size)
        if where == name and first < last:
            assert not piece.target[first - piece.begin : last - piece.begin].any()


def test_what_nobody_reads_is_compared_at_the_end(path: Path) -> None:
    reader = reader_of(path)
    wanted = all_pieces(reader)
    reader.copy([wanted["a.safetensors", "t0"]])
    assert not reader.is_done
    flip(path / "state/b.safetensors", (path / "state/b.safetensors").stat().st_size - 1)
    with pytest.raises(load.DamagedError, match=r"b\.safetensors has wrong contents"):
        reader.finish()


def test_a_header_that_is_read_otherwise_the_second_time_is_noticed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of bytes that flip in RAM: where its tensors are said to be is not what was compared."""

    class Flipping(Reads):
        def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
            count = super().read_into(descriptor, buffer, offset)
            if offset == 8:  # the text of a header, and no chunk
                buffer[:count] = bytes(buffer[:count]).replace(b'"t1"', b'"u1"')
            return count

    monkeypatch.setattr(files, "system", Flipping())
    reader = reader_of(path)
    assert "u1" in reader.places("a.safetensors")
    with pytest.raises(load.DamagedError, match=r"a\.safetensors has changed while it was read"):
        reader.finish()


@pytest.mark.parametrize("index", [0, 1, 6, 7, 8, 9, 30, 60])
def test_a_damaged_header_is_told_as_damage(path: Path, index: int) -> None:
    """Whether it can still be read or not, and whoever has read it."""
    flip(path / "a.safetensors", index)
    words = r"a\.safetensors has wrong contents between bytes 0 and 8192"
    reader = reader_of(path)
    with pytest.raises(load.DamagedError, match=words):
        reader.copy(all_pieces(reader).values())
    with pytest.raises(load.DamagedError, match=words), reader_of(path).damage_blamed():
        raise ValueError("something is wrong")


def test_another_error_is_told_where_headers_are_right(path: Path) -> None:
    flip(path / "a.safetensors", (path / "a.safetensors").stat().st_size - 1)
    with pytest.raises(ValueError, match="of another model"), reader_of(path).damage_blamed():
        raise ValueError("of another model")


@pytest.mark.parametrize("refuses", ["nothing", "open", "read"])
def test_large_files_are_read_past_the_page_cache_where_that_can_be(
    path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """A stand-in takes direct reads of whole pages, or refuses them as some file systems do."""
    monkeypatch.setattr(comparison, "DIRECT_BYTES", 0)

    class Direct(Reads):
        def open(self, path: Path, flags: int) -> int:
            if flags & os.O_DIRECT and refuses == "open":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
            descriptor = super().open(path, flags & ~os.O_DIRECT)  # the test's own disk may refuse them
            self._open[descriptor] = path.name, flags
            self.flags.add(flags)
            return descriptor

        def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
            if self._open[descriptor][1] & os.O_DIRECT:
                if refuses == "read":
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                address = np.frombuffer(buffer, np.uint8).ctypes.data
                assert not (address | offset | len(buffer)) % comparison.PAGE_BYTES
                buffer = buffer[: comparison.PAGE_BYTES + 100]  # a short read, not of whole pages
            return super().read_into(descriptor, buffer, offset)

    reads = Direct()
    monkeypatch.setattr(files, "system", reads)
    reader = reader_of(path)
    pieces = all_pieces(reader)
    reader.copy(pieces.values())
    reader.finish()
    for (name, _), piece in pieces.items():
        data = (path / name).read_bytes()
        assert bytes(piece.target) == data[piece.begin : piece.begin + piece.target.size]
    assert any(flags & os.O_DIRECT for flags in reads.flags) == (refuses != "open")


@pytest.mark.parametrize(("number", "is_damage"), [(errno.EIO, True), (errno.ENOMEM, False)])
def test_a_read_that_fails_names_its_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_damage: bool
) -> None:
    reader = reader_of(path)
    pieces = all_pieces(reader)

    def before(name: str, flags: int) -> None:
        if name == "b.safetensors":
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "system", Reads(before))
    with pytest.raises(CheckpointError, match=rf"b\.safetensors.*{os.strerror(number)}") as caught:
        reader.copy(pieces.values())
    assert isinstance(caught.value, load.DamagedError) == is_damage


def test_a_directory_without_a_manifest_is_read_and_compared_with_nothing(tmp_path: Path) -> None:
    tensor = torch.randn(5)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    reader = CheckpointReader(tmp_path)
    target = np.zeros(20, np.uint8)
    reader.copy([Piece("x.safetensors", reader.places("x.safetensors")["x"].begin, target)])
    assert target.tobytes() == tensor.numpy().tobytes()
    os.truncate(tmp_path / "x.safetensors", (tmp_path / "x.safetensors").stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"x lies behind its end; restore it, or resume from another"):
        CheckpointReader(tmp_path).places("x.safetensors")


def sealed(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 8


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"\0" * 8,
        b"\xff" * 100,
        b"\x02\0\0\0\0\0\0\0{}\0"[:9],
        b"\x40\0\0\0\0\0\0\0" + b"[" * 64,
        sealed([]),
        sealed({"x": 1}),
        sealed({"x": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}),
        sealed({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
        sealed({"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}),
        sealed({"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}),
        sealed({"x": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}),
        sealed({"x": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}),
        sealed({"x": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}),
    ],
)
def test_file_that_is_not_safetensors_is_refused(tmp_path: Path, data: bytes | None) -> None:
    file = tmp_path / "state.safetensors"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(tmp_path).places(file.name)
    assert file.name in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def lent_tensors(reader: CheckpointReader, stack: ExitStack) -> dict[str, Tensors]:
    return {name: stack.enter_context(reader.open_tensors(name)) for name in NAMES}


def test_tensors_in_their_order_are_read_once_into_few_buffers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of(path)
    reads = Reads()
    monkeypatch.setattr(files, "system", reads)
    with ExitStack() as stack:
        lent = lent_tensors(reader, stack)
        reads.buffers.clear()  # of headers
        for name in NAMES:
            whole = load_file(path / name)
            for key in sorted(whole, key=lambda key: reader.places(name)[key].begin):
                found = lent[name].get_tensor(key)
                assert (found.dtype, found.shape) == (whole[key].dtype, whole[key].shape)
                assert torch.equal(found, whole[key])
    assert len(reads.buffers) <= 4 + read_ahead.BEHIND + 1
    reader.finish()
    for name in NAMES:
        file = path / name
        assert reads.num_bytes[file.name] == file.stat().st_size + header_bytes(file)


@pytest.mark.parametrize("seed", range(10))
def test_tensors_in_any_order_arrive(path: Path, seed: int) -> None:
    chance, reader = random.Random(seed), reader_of(path)
    with ExitStack() as stack:
        lent = lent_tensors(reader, stack)
        whole = {name: load_file(path / name) for name in NAMES}
        for _ in range(60):
            name = chance.choice(NAMES)
            key = chance.choice(list(whole[name]))
            assert torch.equal(lent[name].get_tensor(key), whole[name][key])
    reader.finish()


@pytest.mark.parametrize("seed", range(10))
def test_a_tensor_of_a_damaged_chunk_is_not_lent(path: Path, seed: int) -> None:
    """Those of other chunks are, though the damaged one may have been read ahead."""
    chance = random.Random(seed)
    name = chance.choice(NAMES)
    index = chance.randrange(header_bytes(path / name), (path / name).stat().st_size)
    whole = {each: load_file(path / each) for each in NAMES}
    reader = reader_of(path)
    flip(path / name, index)
    begin = index // CHUNK * CHUNK
    with ExitStack() as stack:
        lent = lent_tensors(reader, stack)
        for each, tensors in whole.items():
            for key, tensor in tensors.items():
                place = reader.places(each)[key]
                first, last = place.begin // CHUNK, (place.begin + place.num_bytes - 1) // CHUNK
                if each == name and place.num_bytes and first <= index // CHUNK <= last:
                    with pytest.raises(load.DamagedError, match=f"wrong contents between bytes {begin} and"):
                        lent[each].get_tensor(key)
                else:
                    assert torch.equal(lent[each].get_tensor(key), tensor)
    with pytest.raises(load.DamagedError, match=f"wrong contents between bytes {begin} and"):
        reader.finish()


def test_buffers_take_no_more_than_the_room_that_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room, most in ((0, 1), (2 * CHUNK, 2), (100 * CHUNK, 4)):
        reader = reader_of(path)
        pieces = all_pieces(reader)
        reads = Reads()
        monkeypatch.setattr(files, "system", reads)
        reader.copy(pieces.values(), room=room)
        assert len(reads.buffers) <= most
        for (name, key), piece in pieces.items():
            expected = load_file(path / name)[key].reshape(-1).view(torch.uint8).numpy()
            assert bytes(piece.target) == expected.tobytes()
