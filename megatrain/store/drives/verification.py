"""Compare what is committed on drives with its checksums, without the model that it is of.

Nothing is written. A run that trains overwrites what an earlier record names, so none may use the drives.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import xxhash

from megatrain.errors import CheckpointError, OutputError, os_errors
from megatrain.hardware.readers import in_order, num_readers
from megatrain.layout.host_buffers import PAGE_BYTES
from megatrain.store.drives import system as calls
from megatrain.store.drives.extents import Chunk, Extent, lay_out
from megatrain.store.drives.places import STATE_NAME
from megatrain.store.drives.record import RECORD_NAME, CommitRecord
from megatrain.store.drives.refusals import damaged_chunk, other_file, other_size


def verify_committed(
    directories: Sequence[Path],
    record: CommitRecord,
    passed: Callable[[int], None] = lambda num_bytes: None,
) -> int:
    """Read every chunk that a record names and compare it with its checksum; return their bytes.

    Args:
        directories: The directories of one node, in the order in which they were written.
        record: The record in the first of them.
        passed: Called with the number of bytes that were found right, again and again.

    Raises:
        CheckpointError: A file is missing, is another one, or a chunk is not what was written; or an earlier
            version wrote the record, which does not say where the chunks are.
        OutputError: A run uses the drives.
    """
    where = directories[0]
    if not record.chunk_bytes:
        raise CheckpointError(
            f"{where / RECORD_NAME} is of an earlier version of megatrain and does not say where its chunks "
            "are; they are checked when the run resumes from them"
        )
    if len(directories) != len(record.drives):
        raise CheckpointError(
            f"{where / RECORD_NAME} names {len(record.drives)} directories, and memory.tiers.nvme "
            f"{len(directories)}; give those with which it was written"
        )
    sizes = [record.chunk_bytes, *record.extent_bytes]
    is_sound = all(type(size) is int and size >= 0 and size % PAGE_BYTES == 0 for size in sizes)
    extents = [Extent(f"extent {number}", size) for number, size in enumerate(record.extent_bytes)]
    chunks, drive_bytes = lay_out(extents if is_sound else [], len(directories), record.chunk_bytes)
    if [len(record.copies), len(record.sums)] != [len(chunks), sum(map(len, chunks))]:
        raise CheckpointError(
            f"{where / RECORD_NAME} is damaged: its sizes, copies and checksums do not belong together; "
            "remove it to resume from the newest checkpoint"
        )
    with ExitStack() as stack:
        files = []
        for directory, size, name in zip(directories, drive_bytes, record.drives, strict=True):
            path = directory / STATE_NAME
            with os_errors("read", path, CheckpointError):
                descriptor = _open(path)
                stack.callback(calls.system.close, descriptor)
                if os.fstat(descriptor).st_size != size + PAGE_BYTES:
                    raise other_size(path)
                page = memoryview(mmap.mmap(-1, PAGE_BYTES))
                _fill(descriptor, page, size)
            if bytes(page[: len(name)]) != name.encode():
                raise other_file(path, where)
            files.append((path, descriptor))
        return _compare(files, record, chunks, passed)


def _open(path: Path) -> int:
    descriptor = calls.system.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        calls.system.close(descriptor)
        raise OutputError(f"{path} is in use by a run; verify it when the run has ended") from error
    except OSError:  # file systems without locks
        pass
    return descriptor


def _compare(
    files: Sequence[tuple[Path, int]],
    record: CommitRecord,
    chunks: Sequence[Sequence[Chunk]],
    passed: Callable[[int], None],
) -> int:
    threads = num_readers()
    largest = max((chunk.stop - chunk.start for parts in chunks for chunk in parts), default=1)
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(mmap.mmap(-1, largest)))

    def check(extent: int, index: int, copy: int, expected: int) -> int:
        chunk, buffer = chunks[extent][index], buffers.get()
        try:
            path, descriptor = files[chunk.drive]
            part, offset = buffer[: chunk.stop - chunk.start], chunk.offsets[copy]
            with os_errors("read", path, CheckpointError):
                _fill(descriptor, part, offset)
            if xxhash.xxh3_64_intdigest(part) != expected:
                raise damaged_chunk(path, index, f"extent {extent}", offset, len(part))
            return len(part)
        finally:
            buffers.put(buffer)

    def checks() -> Iterator[Callable[[], int]]:
        sums = iter(record.sums)
        for extent, copy in enumerate(record.copies):
            for index in range(len(chunks[extent])):
                expected = next(sums)
                if copy != "-":
                    yield partial(check, extent, index, int(copy), expected)

    total = 0
    for num_bytes in in_order(checks(), threads):
        passed(num_bytes)
        total += num_bytes
    return total


def _fill(descriptor: int, buffer: memoryview, offset: int) -> None:
    done = 0
    while done < len(buffer) and (count := calls.system.preadv(descriptor, [buffer[done:]], offset + done)):
        done += count
