"""Packed rows in a file that is written once, whole or not at all, and read row by row.

A folder `<key>` holds `rows.bin` (int32, little-endian) and `manifest.json`. It is made under another name
and renamed when all of it is on the disk, under a lock, so that a run that is killed leaves nothing that
another one would use, and two that begin together make it once. Rows are read by position and never mapped:
the memory of a run does not grow with its data.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatrain.config.sizes import binary, counted
from megatrain.errors import DataError, os_errors
from megatrain.files import fsync_directory, make_directories, rename, seal_tree, write_bytes_durably

_log = logging.getLogger(__name__)

FORMAT = 4
"""The version of these files and of how examples are encoded. Raising it changes every key."""

_ROWS, _MANIFEST = "rows.bin", "manifest.json"
_MAKING = ".making-"
_READ_BYTES = 1 << 24


class Rows(Protocol):
    """Rows of one length, in memory or in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, and the number of tokens of a row."""

    def __len__(self) -> int: ...

    def __getitem__(self, numbers: Sequence[int], /) -> NDArray[np.int32]: ...


class RowFile:
    """Rows of int32 in a file."""

    def __init__(self, path: Path, shape: tuple[int, int]) -> None:
        """Open a file of rows.

        Args:
            path: The file, which may be removed as soon as this returns.
            shape: The number of rows, and the number of tokens of a row.

        Raises:
            DataError: The file is missing, or has another size.
        """
        self.shape = shape
        self._path = path
        with os_errors("read", path, DataError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._descriptor).st_size
        if size != 4 * shape[0] * shape[1]:
            raise DataError(f"{path} has {size:,} bytes, not those of {shape[0]:,} rows; remove its folder")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            with suppress(OSError):  # nothing was written through it
                os.close(self._descriptor)

    def __len__(self) -> int:
        return self.shape[0]

    def name(self) -> str:
        """Read the whole file, and return the name of exactly these rows, as `RowWriter.close` does."""
        digest, done = xxhash.xxh3_128(), 0
        with os_errors("read", self._path, DataError):
            while part := os.pread(self._descriptor, _READ_BYTES, done):
                digest.update(part)
                done += len(part)
        return name_of(self.shape, digest)

    def __getitem__(self, numbers: Sequence[int]) -> NDArray[np.int32]:
        """Return (len(numbers), seq_len) rows."""
        seq_len = self.shape[1]
        rows = np.empty((len(numbers), seq_len), dtype="<i4")
        with os_errors("read", self._path, DataError):
            for row, number in zip(rows, numbers, strict=True):
                if os.preadv(self._descriptor, [row.data], 4 * seq_len * int(number)) != 4 * seq_len:
                    raise DataError(f"{self._path} has become shorter while it was read")
        return rows


class SomeRows:
    """A selection of the rows of a file."""

    def __init__(self, rows: RowFile, numbers: NDArray[np.int64]) -> None:
        """Select rows.

        Args:
            rows: The rows to select from.
            numbers: The numbers of the selected rows, in their new order.
        """
        self.shape = (len(numbers), rows.shape[1])
        self._rows, self._numbers = rows, numbers

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, numbers: Sequence[int]) -> NDArray[np.int32]:
        """Return (len(numbers), seq_len) rows."""
        return self._rows[[int(self._numbers[number]) for number in numbers]]


class RowWriter:
    """Writes rows to a file, and names what it has written."""

    def __init__(self, folder: Path, seq_len: int) -> None:
        """Open a new file.

        Args:
            folder: The folder in which the file is made.
            seq_len: The number of tokens of a row.
        """
        self._path = folder / _ROWS
        self._seq_len = seq_len
        self._digest = xxhash.xxh3_128()
        self._file = self._path.open("xb")
        self.num_rows = 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, rows: NDArray[np.int32]) -> None:
        """Append (num_rows, seq_len) rows."""
        data = np.ascontiguousarray(rows, dtype="<i4")
        assert data.shape[1] == self._seq_len
        with os_errors("write", self._path):
            self._file.write(data.data)
        self._digest.update(data.data)
        self.num_rows += len(data)

    def close(self) -> str:
        """Close the file and return the name of exactly these rows."""
        with os_errors("write", self._path):
            self._file.close()
        return name_of((self.num_rows, self._seq_len), self._digest)


def name_of(shape: tuple[int, int], digest: xxhash.xxh3_128) -> str:
    """Return a name for exactly the rows whose hash this is."""
    return f"{shape[0]}x{shape[1]}-{digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows of the cache, and their manifest."""

    rows: RowFile
    manifest: Mapping[str, Any]


Make = Callable[[Path], dict[str, Any]]
"""A function that writes rows with `RowWriter`, and returns the manifest with `shape` and `fingerprint`."""
Check = Callable[[Kept], object]
"""A function that raises KeyError, TypeError or ValueError if a manifest is not what a reader expects."""


def kept_rows(folder: Path | None, key: str, make: Make, check: Check | None = None) -> Kept:
    """Return the rows of a key: the cached ones if every bit is as it was written, otherwise new ones.

    Args:
        folder: The folder of all keys. If None, the rows exist only as long as they are in use.
        key: The name of everything that the rows are made of.
        make: The function that makes the rows.
        check: The function that checks the manifest of cached rows.

    Raises:
        DataError: The rows cannot be read.
        OutputError: The rows cannot be written.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="megatrain-rows-") as place:
            return _opened(Path(place), make(Path(place)))
    make_directories(folder)
    with _lock(folder / f".lock-{key}"):
        try:
            return _sound(folder / key, check)
        except FileNotFoundError:
            pass
        except _UNUSABLE as error:
            _log.warning("the prepared data in %s cannot be used (%s); it is made anew", folder / key, error)
        making, target = folder / f"{_MAKING}{key}", folder / key
        with os_errors("write", making):
            for leftover in (making, target):  # left by a killed run, or damaged
                shutil.rmtree(leftover, ignore_errors=not leftover.exists())
            making.mkdir(mode=0o700)
        try:
            manifest = make(making)
            document = {"manifest": manifest, "hash": _hash(manifest)}
            write_bytes_durably(making / _MANIFEST, json.dumps(document).encode())
            seal_tree(making)
            rename(making, target)
            fsync_directory(folder)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
    return _opened(target, manifest)


_UNUSABLE = (OSError, ValueError, KeyError, TypeError, DataError)


def find_rows(folder: Path, key: str, check: Check | None = None) -> Kept | None:
    """Return the cached rows of a key, or None if there are none that can be used.

    Args:
        folder: The folder of all keys.
        key: The key, as in `kept_rows`.
        check: The check, as in `kept_rows`.
    """
    try:
        return _sound(folder / key, check)
    except _UNUSABLE:
        return None


@dataclass(frozen=True, slots=True)
class Removed:
    """The result of `remove_unused`: the numbers of removed folders and bytes."""

    num_sets: int
    set_bytes: int
    num_left_over: int
    """The number of folders that killed processes had begun."""
    left_over_bytes: int

    def describe(self) -> str:
        """Describe what was removed; the text is empty if nothing was."""
        sets = f"{counted(self.num_sets, 'set')} of prepared data"
        parts = [f"{sets} ({binary(self.set_bytes)})"] if self.num_sets else []
        if self.num_left_over:
            parts.append(f"what a killed process had begun to prepare ({binary(self.left_over_bytes)})")
        return " and ".join(parts)


def remove_unused(folder: Path, most_bytes: int, *, for_s: float = 0.0) -> Removed:
    """Remove the least recently used rows until the rest takes up at most `most_bytes`.

    Leftovers of killed processes are removed first. Rows that a process is reading stay readable for it.

    Args:
        folder: The folder of all keys.
        most_bytes: The number of bytes that may stay.
        for_s: The number of seconds within which rows must have been used to stay in any case.

    Raises:
        OutputError: Some rows cannot be removed.
    """
    used: dict[Path, float] = {}
    sizes: dict[Path, int] = {}
    with os_errors("read", folder):
        for place in folder.iterdir() if folder.is_dir() else ():
            with suppress(FileNotFoundError):  # another process has just removed or renamed it
                if place.is_dir():
                    used[place] = place.stat().st_mtime
                    sizes[place] = sum(file.stat().st_size for file in place.iterdir())
    total = sum(sizes.values())
    sets: list[int] = []
    left_over: list[int] = []
    for place in sorted(sizes, key=lambda place: (not place.name.startswith(_MAKING), used[place])):
        is_left_over = place.name.startswith(_MAKING)
        is_old = total > most_bytes and time.time() - used[place] >= for_s
        if not (is_left_over or (is_old and (place / _MANIFEST).is_file())):
            continue
        with _lock(folder / f".lock-{place.name.removeprefix(_MAKING)}", waits=False) as is_free:
            if is_free and place.is_dir():
                with os_errors("remove", place):
                    shutil.rmtree(place)
                total -= sizes[place]
                (left_over if is_left_over else sets).append(sizes[place])
    return Removed(len(sets), sum(sets), len(left_over), sum(left_over))


def _sound(place: Path, check: Check | None) -> Kept:
    """Open the cached rows of a folder, which must have the bits that were written."""
    document = json.loads((place / _MANIFEST).read_text(encoding="utf-8"))
    if document["hash"] != _hash(document["manifest"]):
        raise ValueError("its manifest is damaged")
    found = _opened(place, document["manifest"])
    if check is not None:
        check(found)
    if found.rows.name() != found.manifest["fingerprint"]:
        raise ValueError("its rows are damaged")
    with suppress(OSError):  # the folder may belong to another user
        os.utime(place)  # `remove_unused` removes the least recently used rows first
    return found


def _hash(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _opened(folder: Path, manifest: Mapping[str, Any]) -> Kept:
    num_rows, seq_len = manifest["shape"]
    return Kept(RowFile(folder / _ROWS, (num_rows, seq_len)), manifest)


@contextmanager
def _lock(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Hold a lock that ends with the process, however it ends; yield False if another process has it."""
    with os_errors("lock", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waits:
                yield False
                return
            _log.info("another process prepares this data; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield True
    finally:
        os.close(descriptor)
