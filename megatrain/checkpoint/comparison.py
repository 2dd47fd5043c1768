"""Compare the files of a checkpoint with the digests of its manifest, on several threads.

What must stay true: the error is that of the first wrong place in the order of the manifest, whichever thread
has met it first, and there are never more buffers than threads.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path

import xxhash

from megatrain import files
from megatrain.checkpoint import format
from megatrain.hardware.readers import in_order, num_readers

BUFFER_BYTES = 1 << 20
"""The bytes of one read: they are still in a core's cache when they are hashed."""
INLINE_BYTES = 32 << 20
"""Up to so many bytes, the calling thread compares alone: to begin others would take longer."""


def compare(
    path: Path, manifest: format.Manifest, passed: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Read all files that a manifest lists, whose sizes are right, and compare them with it.

    Args:
        path: The directory of the files.
        manifest: The manifest.
        passed: Called with the number of bytes that were found right, again and again.

    Raises:
        FormatError: A chunk has other bytes; the error names the first one.
        OSError: A file cannot be read.
    """
    total = sum(entry.num_bytes for entry in manifest.files)
    threads = 1 if total <= INLINE_BYTES else num_readers()
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    size = max(1, min(BUFFER_BYTES, manifest.chunk_bytes))
    for _ in range(threads):
        buffers.put(memoryview(bytearray(size)))

    def check(entry: format.FileEntry, index: int) -> int:
        buffer = buffers.get()
        try:
            return _check_chunk(path, entry, index, manifest.chunk_bytes, buffer)
        finally:
            buffers.put(buffer)

    calls = (partial(check, entry, index) for entry in manifest.files for index in range(len(entry.digests)))
    for num_bytes in in_order(calls, threads):
        passed(num_bytes)


def check_size(path: Path, entry: format.FileEntry) -> None:
    """Compare the size of a file with that in a manifest.

    Raises:
        FormatError: It has another one.
        OSError: There is no such file, or it cannot be looked at.
    """
    num_bytes = (path / entry.name).stat().st_size
    if num_bytes != entry.num_bytes:
        raise format.FormatError(f"{entry.name} has {num_bytes} bytes in place of {entry.num_bytes}")


def _check_chunk(
    path: Path, entry: format.FileEntry, index: int, chunk_bytes: int, buffer: memoryview
) -> int:
    begin = index * chunk_bytes
    end = min(begin + chunk_bytes, entry.num_bytes)
    digest, file = xxhash.xxh3_128(), path / entry.name
    with files.opened(file, os.O_RDONLY) as descriptor:
        at = begin
        while at < end and (count := _read_into(descriptor, buffer[: end - at], at, file)):
            digest.update(buffer[:count])
            at += count
    if digest.hexdigest() != entry.digests[index]:
        raise format.FormatError(f"{entry.name} has wrong contents between bytes {begin} and {end}")
    return end - begin


def _read_into(descriptor: int, buffer: memoryview, offset: int, file: Path) -> int:
    """Read some bytes; the error of the system gets the name of the file, which it lacks."""
    try:
        return files.system.read_into(descriptor, buffer, offset)
    except OSError as error:
        error.filename = str(file)
        raise
