"""Compare the chunks of a checkpoint's files with the digests of its manifest, as they are read by threads.

What must stay true: the error is that of the first wrong place in the order of the manifest, whichever thread
has met it first, and there are never more buffers than threads.
"""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import os
import queue
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import xxhash

from megatrain import files
from megatrain.checkpoint import format
from megatrain.filesystems import named_filesystem
from megatrain.hardware.readers import in_order, num_readers
from megatrain.layout.host_buffers import PAGE_BYTES, padded

_log = logging.getLogger(__name__)

DIRECT_BYTES = 1 << 20
"""Smaller files pass the page cache, where direct reads and writes save nothing."""
BUFFER_BYTES = 1 << 20
"""The bytes of one read: they are still in a core's cache when they are hashed."""
INLINE_BYTES = 32 << 20
"""Up to so many bytes, the calling thread reads alone: to begin others would take longer."""

Chunk = tuple[format.FileEntry, int]
"""A file, and the number of one of its chunks."""


def compare(
    path: Path,
    manifest: format.Manifest,
    passed: Callable[[int], None] = lambda num_bytes: None,
    *,
    chunks: Iterable[Chunk] | None = None,
) -> None:
    """Read files that a manifest lists, whose sizes are right, and compare them with it.

    Args:
        path: The directory of the files.
        manifest: The manifest.
        passed: Called with the number of bytes that were found right, again and again.
        chunks: The chunks to read; None: all of all files.

    Raises:
        FormatError: A chunk has other bytes; the error names the first one.
        OSError: A file cannot be read.
    """
    wanted = list(every_chunk(manifest.files) if chunks is None else chunks)
    size = max(1, min(BUFFER_BYTES, manifest.chunk_bytes))
    threads = threads_for(wanted, manifest.chunk_bytes)
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(bytearray(size)))

    def check(entry: format.FileEntry, index: int) -> int:
        buffer = buffers.get()
        try:
            return read_chunk(path, entry, index, manifest.chunk_bytes, buffer)
        finally:
            buffers.put(buffer)

    for num_bytes in in_order((partial(check, *chunk) for chunk in wanted), threads):
        passed(num_bytes)


def every_chunk(entries: Iterable[format.FileEntry]) -> Iterable[Chunk]:
    """Yield the chunks of files in order."""
    return ((entry, index) for entry in entries for index in range(len(entry.digests)))


def threads_for(chunks: Iterable[Chunk], chunk_bytes: int) -> int:
    """Return how many threads are to read some chunks."""
    total = sum(min(chunk_bytes, entry.num_bytes) for entry, _ in chunks)
    return 1 if total <= INLINE_BYTES else num_readers()


def check_size(path: Path, entry: format.FileEntry) -> None:
    """Compare the size of a file with that in a manifest.

    Raises:
        FormatError: It has another one.
        OSError: There is no such file, or it cannot be looked at.
    """
    num_bytes = (path / entry.name).stat().st_size
    if num_bytes != entry.num_bytes:
        raise format.FormatError(f"{entry.name} has {num_bytes} bytes in place of {entry.num_bytes}")


def read_chunk(
    path: Path,
    entry: format.FileEntry,
    index: int,
    chunk_bytes: int,
    buffer: memoryview,
    *,
    is_direct: bool = False,
) -> int:
    """Read a chunk, compare it with its digest, and return how many bytes it has.

    Args:
        path: The directory of the file.
        entry: What the manifest says of the file; one without digests is read, and compared with nothing.
        index: The number of the chunk.
        chunk_bytes: The bytes of a chunk that is not the last one.
        buffer: The memory to read into. One that holds the chunk, in whole pages, has it afterwards; a
            smaller one is used again and again.
        is_direct: Whether to read past the page cache, where that can be: the buffer begins at a page then.

    Raises:
        FormatError: The chunk has other bytes, or the file ends before.
        OSError: The file cannot be read.
    """
    begin = index * chunk_bytes
    end = min(begin + chunk_bytes, entry.num_bytes)
    file, read = path / entry.name, 0
    is_aligned = chunk_bytes % PAGE_BYTES == BUFFER_BYTES % PAGE_BYTES == 0
    digest = ""
    if is_direct and is_aligned and entry.num_bytes >= DIRECT_BYTES and hasattr(os, "O_DIRECT"):
        try:
            digest, read = _read(file, begin, end, buffer, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _say_indirect(named_filesystem(path))
            is_direct = False
    else:
        is_direct = False
    if not is_direct:
        digest, read = _read(file, begin, end, buffer, 0)
    if read < end - begin and not entry.digests:
        raise format.FormatError(f"{entry.name} ends before byte {end}")
    if entry.digests and digest != entry.digests[index]:
        raise format.FormatError(f"{entry.name} has wrong contents between bytes {begin} and {end}")
    return end - begin


def _read(file: Path, begin: int, end: int, buffer: memoryview, flag: int) -> tuple[str, int]:
    """Read bytes of a file, fewer where it ends; return their digest and their number.

    Each piece is hashed as it comes, while it is in a core's cache.
    """
    digest = xxhash.xxh3_128()
    holds_all = len(buffer) >= end - begin
    with files.opened(file, os.O_RDONLY | flag) as descriptor:
        at = begin
        while at < end:
            start = at - begin if holds_all else 0
            wanted = min(BUFFER_BYTES, end - at, len(buffer) - start)
            asked = padded(wanted) if flag else wanted
            count = min(wanted, _read_into(descriptor, buffer[start : start + asked], at, file))
            if flag and count < wanted:  # what comes next must begin at a page again
                count -= count % PAGE_BYTES
            if not count:
                break
            digest.update(buffer[start : start + count])
            at += count
    return digest.hexdigest(), at - begin


@functools.cache
def _say_indirect(filesystem: str) -> None:
    """Name a file system that takes no direct reads, once."""
    _log.info("the file system %s takes no direct reads; checkpoints pass the page cache", filesystem)


def new_buffer(num_bytes: int) -> memoryview:
    """Return memory that begins at a page, and has whole pages."""
    return memoryview(mmap.mmap(-1, max(PAGE_BYTES, padded(num_bytes))))


def _read_into(descriptor: int, buffer: memoryview, offset: int, file: Path) -> int:
    """Read some bytes; the error of the system gets the name of the file, which it lacks."""
    try:
        return files.system.read_into(descriptor, buffer, offset)
    except OSError as error:
        error.filename = str(file)
        raise
