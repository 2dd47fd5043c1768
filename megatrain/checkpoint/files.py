"""Change files so that what was written is there after a crash, or nothing is.

Every call into the operating system that changes a file or reads a checkpoint back goes through `system`, one
object with one method per call. Tests put an object there that records, fails or dies at the n-th call; code
that went around it would not be tested by them. What must stay true: an `OSError` never leaves this file from
a function that writes; it becomes an `OutputError` that names the path and the cause.

Source of the tensor file layout: the safetensors format description (an 8-byte little-endian header length, a
JSON header that may be padded with spaces, the raw data without holes).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from megatrain.errors import OutputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

HEADER_ALIGNMENT = 4096
"""Tensor data begin at a multiple of this, so that they can be written and read with direct I/O."""
_PIECE_BYTES = 8 * 2**20  # of one read or write call: a signal is answered soon, and no buffer is large

# Names of the safetensors format for the names of torch, which is not imported here.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


class FileCalls:
    """The calls into the operating system, one method each."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file; a new one gets the permissions of the umask."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of `data`; return how many bytes."""
        return os.write(descriptor, data)

    def read(self, descriptor: int, num_bytes: int) -> bytes:
        """Read at most `num_bytes`; nothing at the end of the file."""
        return os.read(descriptor, num_bytes)

    def fsync(self, descriptor: int) -> None:
        """Wait until a file, or the entries of a directory, are on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def mkdir(self, path: Path, mode: int) -> None:
        """Make a directory that was not there."""
        os.mkdir(path, mode)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name, atomically; a file there is replaced."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)


system = FileCalls()
"""What every function here calls; tests put another object in its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """One tensor of a file to be: its header entry now, its values when it is their turn."""

    name: str
    """Name in the file."""
    dtype: torch.dtype
    """Type of the elements."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    get: Callable[[], Tensor]
    """Return the tensor, of this dtype and shape, on any device; called once, and the result is let go of."""


@contextlib.contextmanager
def output_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the body into an OutputError: cannot `action` `path`, why, and what to do."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error) or type(error).__name__
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space there, or write to another directory"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "write to a directory that this user may change"
        else:
            advice = "check this path and its disk, or write to another directory"
        raise OutputError(f"cannot {action} {path}: {cause}; {advice}") from error


def make_directories(path: Path) -> None:
    """Make a directory and the parents that it lacks, each one durable before the next.

    Raises:
        OutputError: One cannot be made, or is a file.
    """
    with output_errors("make the directory", path):
        missing = [level for level in (path, *path.parents) if not level.exists()]
        for level in reversed(missing):
            system.mkdir(level, 0o777)
            fsync_directory(level.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def make_private_directory(path: Path) -> None:
    """Make a directory that was not there, for this user only.

    Raises:
        OutputError: It cannot be made, or something has that name.
    """
    with output_errors("make the directory", path):
        system.mkdir(path, 0o700)


def write_bytes_durably(path: Path, data: bytes) -> None:
    """Put `data` into a file, new or old; a crash leaves the file as it was or as it should be.

    Raises:
        OutputError: The file cannot be written; what was there is still there.
    """
    with _replacing(path) as descriptor:
        _write_all(descriptor, memoryview(data), path)


def write_safetensors(path: Path, tensors: Sequence[TensorSource], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, one tensor in memory at a time; durable and all or nothing, as bytes are.

    Tensors are asked for by decreasing size of their elements, otherwise in the order given: the format has
    no holes, and an odd number of small elements first would leave the rest misaligned.

    Args:
        path: The file, new or old.
        tensors: The tensors; names differ.
        metadata: Strings for the header.

    Raises:
        OutputError: The file cannot be written; what was there is still there.
    """
    ordered = sorted(tensors, key=lambda source: -source.dtype.itemsize)
    header = _safetensors_header(ordered, metadata)
    with _replacing(path) as descriptor:
        _write_all(descriptor, memoryview(header), path)
        for source in ordered:
            _write_all(descriptor, _raw_bytes(source), path)


def fsync_file(path: Path) -> None:
    """Wait until what was written to a file, by whomever, is on the disk.

    Raises:
        OutputError: It cannot be; the file must not be trusted, and trying again would not tell the truth.
    """
    with output_errors("write", path), _opened(path, os.O_RDONLY) as descriptor:
        system.fsync(descriptor)


def fsync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk.

    Raises:
        OutputError: They cannot be.
    """
    with (
        output_errors("write the directory", path),
        _opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor,
    ):
        try:
            system.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            logger.warning("the filesystem of %s cannot make names durable; a power cut may lose them", path)


def rename(source: Path, target: Path) -> None:
    """Give a file or directory another name, atomically; durable once the parent directory has been fsynced.

    Raises:
        OutputError: It cannot be renamed, and has its old name.
    """
    with output_errors(f"rename {source.name} to", target):
        system.rename(source, target)


def remove_tree(path: Path, *, first: str) -> None:
    """Remove a directory and what is in it, beginning with the file named `first` if it is there.

    Raises:
        OutputError: Something cannot be removed.
    """
    with output_errors("remove", path):
        if os.path.lexists(path / first):
            system.unlink(path / first)
            fsync_directory(path)  # from here on, whatever else is left cannot be taken for whole
        for parent, directories, names in os.walk(path, topdown=False, onerror=_raise):
            for name in names:
                system.unlink(Path(parent, name))
            for name in directories:
                inner = Path(parent, name)
                (system.unlink if inner.is_symlink() else system.rmdir)(inner)
        system.rmdir(path)


def list_tree(path: Path) -> tuple[list[str], list[str]]:
    """List a directory: the relative names of its files and of its directories, sorted, joined by `/`.

    Raises:
        OSError: A directory cannot be read, or holds something that is neither a file nor a directory.
    """
    files: list[str] = []
    directories: list[str] = []
    pending = [""]
    while pending:
        parent = pending.pop()
        with os.scandir(path / parent) as entries:
            for entry in entries:
                name = parent + entry.name
                if entry.is_dir(follow_symlinks=False):
                    directories.append(name)
                    pending.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    files.append(name)
                else:
                    raise OSError(f"{name} is not a regular file")
    return sorted(files), sorted(directories)


def read_bytes(path: Path) -> bytes:
    """Read a small file.

    Raises:
        OSError: The file cannot be read.
    """
    pieces = []
    with _opened(path, os.O_RDONLY) as descriptor:
        while piece := system.read(descriptor, _PIECE_BYTES):
            pieces.append(piece)
    return b"".join(pieces)


def read_digests(path: Path, chunk_bytes: int) -> Iterator[tuple[int, str]]:
    """Read a file once; yield the size and the xxh3-128 of each of its chunks.

    Raises:
        OSError: The file cannot be read.
    """
    with _opened(path, os.O_RDONLY) as descriptor:
        while True:
            digest, size = xxhash.xxh3_128(), 0
            while size < chunk_bytes:
                piece = system.read(descriptor, min(chunk_bytes - size, _PIECE_BYTES))
                if not piece:
                    break
                digest.update(piece)
                size += len(piece)
            if size == 0:
                return
            yield size, digest.hexdigest()


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = system.open(path, flags)
    try:
        yield descriptor
    finally:
        system.close(descriptor)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """Open a new file for the body to write; then make it durable and give it the name `path`."""
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    with output_errors("write", path):
        descriptor = system.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            yield descriptor
            with output_errors("write", path):
                system.fsync(descriptor)
        finally:
            with output_errors("write", path):
                system.close(descriptor)
        rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            system.unlink(temporary)
        raise
    fsync_directory(path.parent)


def _write_all(descriptor: int, data: memoryview, path: Path) -> None:
    with output_errors("write", path):
        while len(data):  # a disk may take a part of a write, and say why only at the next one
            data = data[system.write(descriptor, data[:_PIECE_BYTES]) :]


def _safetensors_header(tensors: Sequence[TensorSource], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for source in tensors:
        assert source.name not in {*entries, "__metadata__"}, f"{source.name} twice in one file"
        count = 1
        for size in source.shape:
            count *= size
        end = begin + count * source.dtype.itemsize
        dtype = _DTYPES[str(source.dtype).removeprefix("torch.")]
        entries[source.name] = {"dtype": dtype, "shape": list(source.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _raw_bytes(source: TensorSource) -> memoryview:
    """Return the bytes of a tensor; no copy of one that is contiguous and on the host."""
    import torch

    tensor = source.get().detach()
    found, announced = (tensor.dtype, tuple(tensor.shape)), (source.dtype, source.shape)
    assert found == announced, f"{source.name} is {found}, announced as {announced}"
    array: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _raise(error: OSError) -> None:
    raise error
