from __future__ import annotations

import errno
import json
import os
import stat
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatrain import files
from megatrain.checkpoint import tensor_files
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.errors import OutputError
from megatrain.layout import tensor_file
from tests.checkpoint.faults import Failing

DTYPES = [getattr(torch, name) for name in tensor_file.DTYPES.values()]


def source(name: str, tensor: Tensor) -> tensor_files.TensorSource:
    return tensor_files.TensorSource(
        name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), get=lambda: tensor
    )


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    tensor_files.write_safetensors(path, [source(*item) for item in tensors.items()])


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_safetensors_own_reader_gets_every_bit_of_every_dtype(tmp_path: Path) -> None:
    noise = torch.randint(0, 2, (3, 7), dtype=torch.uint8)
    tensors = {str(dtype): noise.to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(4, 6).t(),
        "odd bytes": torch.arange(5, dtype=torch.int8),
        '\u00fc "quoted"': torch.tensor([float("nan"), -0.0, 1e-45]),
        "needs grad": torch.randn(3, requires_grad=True),
    }
    path = tmp_path / "model.safetensors"
    write(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    places, data = CheckpointReader(tmp_path).places(path.name), path.read_bytes()
    assert places.keys() == tensors.keys()
    for name, tensor in tensors.items():
        place = places[name]
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert (f"torch.{place.dtype}", place.shape) == (str(tensor.dtype), tuple(tensor.shape))
        assert bits(other) == bits(tensor.detach()) == data[place.begin : place.begin + place.num_bytes]


def test_data_are_aligned(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"a": torch.arange(3, dtype=torch.int8), "b": torch.randn(2), "c": torch.randn(1).bfloat16()})
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    assert (8 + header_bytes) % tensor_files.HEADER_ALIGNMENT == 0
    offsets = {
        name: entry["data_offsets"][0]
        for name, entry in json.loads(data[8 : 8 + header_bytes]).items()
        if name != "__metadata__"
    }
    assert offsets == {"b": 0, "c": 8, "a": 10}


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def get() -> Tensor:
        assert not any(ref() is not None for ref in alive)
        tensor = torch.ones(1000)
        alive.append(weakref.ref(tensor))
        return tensor

    sources = [
        tensor_files.TensorSource(name=str(index), dtype=torch.float32, shape=(1000,), get=get)
        for index in range(5)
    ]
    tensor_files.write_safetensors(tmp_path / "model.safetensors", sources)
    assert len(alive) == 5


def test_tensor_other_than_announced_is_our_mistake(tmp_path: Path) -> None:
    wrong = tensor_files.TensorSource(name="a", dtype=torch.float32, shape=(3,), get=lambda: torch.ones(4))
    with pytest.raises(AssertionError, match="announced"):
        tensor_files.write_safetensors(tmp_path / "model.safetensors", [wrong])
    with pytest.raises(AssertionError, match="twice"):
        tensor_files.write_safetensors(tmp_path / "model.safetensors", [source("a", torch.ones(1))] * 2)
    assert list(tmp_path.iterdir()) == []


def test_error_while_reading_the_source_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    def get() -> Tensor:
        raise FileNotFoundError(errno.ENOENT, "no such shard")

    missing = tensor_files.TensorSource(name="a", dtype=torch.float32, shape=(3,), get=get)
    with pytest.raises(FileNotFoundError, match="no such shard"):
        tensor_files.write_safetensors(tmp_path / "model.safetensors", [missing])
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    files.write_bytes_durably(path, b"old")
    for at in range(9):
        system, message = Failing(at, errno.ENOSPC), ""
        with monkeypatch.context() as patch:
            patch.setattr(files, "system", system)
            try:
                files.write_bytes_durably(path, b"new")
            except OutputError as error:
                message = str(error)
        assert ("No space left on device" in message) == (at < 8)
        assert path.read_bytes() == (b"old" if at < 5 else b"new")  # call 4 is the rename
        assert [inner.name for inner in tmp_path.iterdir()] == ["config.yaml"]
        files.write_bytes_durably(path, b"old")
    assert system.failed == []


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(files.FileCalls):
        def write(self, descriptor: int, data: memoryview) -> int:
            return os.write(descriptor, data[:7])

    monkeypatch.setattr(files, "system", Short())
    files.write_bytes_durably(tmp_path / "data", bytes(range(256)))
    assert (tmp_path / "data").read_bytes() == bytes(range(256))


def test_filesystem_without_directory_fsync_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoDirectoryFsync(files.FileCalls):
        def fsync(self, descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(files, "system", NoDirectoryFsync())
    files.write_bytes_durably(tmp_path / "data", b"new")
    assert (tmp_path / "data").read_bytes() == b"new"
    assert "cannot make names durable" in caplog.text


@pytest.mark.parametrize("name", ["with space", "\u00fcber", "x" * 200])
def test_directories_of_any_name_are_made(tmp_path: Path, name: str) -> None:
    files.make_directories(tmp_path / name / "checkpoints")
    files.make_directories(tmp_path / name / "checkpoints")
    assert (tmp_path / name / "checkpoints").is_dir()


def test_directory_in_the_way_of_a_file_or_under_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot make the directory .*: Not a directory"):
        files.make_directories(tmp_path / "file")
    with pytest.raises(OutputError, match=r"cannot make the directory .*: Not a directory"):
        files.make_directories(tmp_path / "file" / "checkpoints")
    (tmp_path / "directory").mkdir()
    with pytest.raises(OutputError, match=r"directory: Is a directory"):
        files.write_bytes_durably(tmp_path / "directory", b"")
    with pytest.raises(OutputError, match="File name too long"):
        files.write_bytes_durably(tmp_path / ("x" * 300), b"")


def test_files_are_private_and_no_link_is_followed(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(target)
    before = os.umask(0o000)
    try:
        files.write_bytes_durably(tmp_path / "new", b"new")
        files.write_bytes_durably(tmp_path / "link", b"new")  # replaces the link, not what it leads to
        files.make_directories(tmp_path / "outer" / "inner")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "outer/inner").stat().st_mode) == 0o700
    assert target.read_bytes() == b"mine"
    assert not (tmp_path / "link").is_symlink()
    (tmp_path / "other").symlink_to(target)
    for act in (files.open_to_append, files.read_bytes):
        with pytest.raises((OSError, OutputError), match=r"symbolic link"):
            act(tmp_path / "other")
    with pytest.raises(OutputError, match="it is a symbolic link"):
        files.copy_file_durably(tmp_path / "other", tmp_path / "copy")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/config.json").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "whole")
    with pytest.raises(OutputError, match="it is a symbolic link"):
        files.remove_tree(tmp_path / "linked", first="config.json")
    assert (tmp_path / "whole/config.json").exists()


def test_sealed_tree_is_private_whoever_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir(mode=0o755)
    for name in ("a", "inner/b"):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o644)
    assert files.seal_tree(tmp_path) == ["a", "inner/b"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"a": 0o600, "b": 0o600, "inner": 0o700}
