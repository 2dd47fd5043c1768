"""A large file of a checkpoint that is written chunk by chunk, in any order, by several threads.

A chunk is the unit of a digest. Its bytes are copied into a buffer of the caller's, and from then on the
state that they were copied from may change; they are summed up and written from the buffer.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatrain import files
from megatrain.checkpoint import format
from megatrain.checkpoint.comparison import DIRECT_BYTES
from megatrain.checkpoint.contents import Group, LargeFile, Lent, Part
from megatrain.checkpoint.format import FileEntry
from megatrain.errors import os_errors
from megatrain.layout.host_buffers import PAGE_BYTES, padded

_log = logging.getLogger(__name__)


class Target:
    """One file that is being written."""

    def __init__(self, path: Path, file: LargeFile) -> None:
        self.path, self.file = path, file
        self.all_chunks: list[Chunk] = []
        self._digests = [""] * -(-file.num_bytes // format.CHUNK_BYTES)
        self.num_left = len(self._digests)
        self._lock = threading.Lock()
        files.make_directories(path.parent)
        with os_errors("write", path):
            self._descriptor: int | None = files.system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                self.is_direct = file.num_bytes >= DIRECT_BYTES and _make_direct(self._descriptor, path)
            except BaseException:
                self.abandon()
                raise

    def chunks(self, lent: dict[Group, Lent]) -> list[Chunk]:
        """Cut the file; `lent` has the groups met so far, of all files."""
        self.all_chunks = [
            Chunk(
                self,
                number,
                self.file.parts(start, min(start + format.CHUNK_BYTES, self.file.num_bytes)),
                lent,
            )
            for number, start in enumerate(range(0, self.file.num_bytes, format.CHUNK_BYTES))
        ]
        return self.all_chunks

    def write(self, number: int, data: memoryview, digest: str) -> None:
        """Write a chunk; the last one makes the file durable."""
        assert self._descriptor is not None
        with os_errors("write", self.path):
            _write_at(
                self._descriptor, data, number * format.CHUNK_BYTES, self.path, is_direct=self.is_direct
            )
        with self._lock:
            self._digests[number] = digest
            self.num_left -= 1
            is_last = not self.num_left
        if is_last:
            self.end()

    def end(self) -> None:
        """Cut what was padded, make the file durable, and close it."""
        assert self._descriptor is not None
        with os_errors("write", self.path):
            if self.is_direct and self.file.num_bytes % PAGE_BYTES:
                files.system.truncate(self._descriptor, self.file.num_bytes)
            files.system.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, None
            files.system.close(descriptor)

    def abandon(self) -> None:
        """Close the file as it is, and give back what was lent for it."""
        if self._descriptor is not None:
            with suppress(OSError):
                files.system.close(self._descriptor)
            self._descriptor = None
        for chunk in self.all_chunks:
            chunk.give_back()

    def entry(self) -> FileEntry:
        """Return what the manifest says of the file."""
        return FileEntry(name=self.file.name, num_bytes=self.file.num_bytes, digests=tuple(self._digests))


class Chunk:
    """One chunk of a file: what is copied into it, and which blocks must not change before."""

    def __init__(self, target: Target, number: int, parts: Iterable[Part], lent: dict[Group, Lent]) -> None:
        self._target, self._number = target, number
        self._parts = tuple(parts)
        self._lent = [lent.setdefault(part.place.group, Lent(part.place.group)) for part in self._parts]
        for each in self._lent:
            each.add()
        self.blocks = frozenset().union(*(part.place.group.blocks for part in self._parts))
        self.is_taken = False
        """A thread copies it, or has copied it."""
        self.holder: int | None = None
        """The thread that copies or writes it at this moment, or has copied it for another one to write."""
        start = number * format.CHUNK_BYTES
        self._num_bytes = min(format.CHUNK_BYTES, target.file.num_bytes - start)
        self._header = target.file.header[start : start + format.CHUNK_BYTES]

    def copy_into(self, buffer: Any) -> None:
        """Copy its bytes to the beginning of a buffer."""
        buffer[: len(self._header)] = np.frombuffer(self._header, np.uint8)
        for part, lent in zip(self._parts, self._lent, strict=True):
            buffer[part.at : part.at + part.stop - part.start] = lent.bytes_of(part)
            lent.done()
        self._lent = []
        buffer[self._num_bytes : padded(self._num_bytes)] = 0

    def give_back(self) -> None:
        """Let go of what was lent for it, if it was not copied."""
        for each in self._lent:
            with suppress(Exception):  # the save has failed already, and says why
                each.close()
        self._lent = []

    def write(self, buffer: mmap.mmap) -> None:
        """Sum up and write what a buffer holds."""
        whole = memoryview(buffer)
        data = whole[: self._num_bytes]
        digest = xxhash.xxh3_128_hexdigest(data)
        num_bytes = padded(self._num_bytes) if self._target.is_direct else self._num_bytes
        self._target.write(self._number, whole[:num_bytes], digest)


def _make_direct(descriptor: int, path: Path) -> bool:
    """Let writes go past the page cache; where the file system cannot do that, say so."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        _set_direct(descriptor, is_direct=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _say_indirect(path)
        return False
    return True


def _set_direct(descriptor: int, *, is_direct: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    flags = flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _write_at(descriptor: int, data: memoryview, offset: int, path: Path, *, is_direct: bool) -> None:
    """Write all of `data` at a place of a file; direct writes go on at whole pages after a short one."""
    while len(data):
        try:
            num_bytes = files.system.write_at(descriptor, data, offset)
        except OSError as error:
            if not is_direct or error.errno != errno.EINVAL:
                raise
            _say_indirect(path)  # some file systems refuse only now
            num_bytes = 0
        if is_direct and num_bytes < len(data):
            num_bytes -= num_bytes % PAGE_BYTES
            if not num_bytes:  # the next write, past no cache, says what is wrong
                _set_direct(descriptor, is_direct=False)
                is_direct = False
        data = data[num_bytes:]
        offset += num_bytes


_told: set[Path] = set()


def _say_indirect(path: Path) -> None:
    """Name the file system that takes no direct writes, once for each run's directory."""
    root = path.parent.parent
    if root not in _told:
        _told.add(root)
        _log.info("the file system of %s takes no direct writes; checkpoints pass the page cache", root)
