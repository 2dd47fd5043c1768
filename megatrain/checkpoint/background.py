"""Large files of a checkpoint, written while training goes on: each block is copied before its next update.

Between two updates of a block nothing changes its state, so a checkpoint needs no second copy of it. Files
are cut in chunks, the ones that have digests. A chunk is copied into a buffer of a fixed pool, summed up and
written from there; once all chunks of a block are copied, the block may change. A change that comes earlier
waits in `before_change`, and copies what is left of its block itself. So an update waits for the drive only
where the pool is full.

What must stay true: no byte of a checkpoint is read after `before_change` has returned for its block; a
failure lets every change go on at once, and is raised by `wait`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatrain import files
from megatrain.checkpoint.comparison import DIRECT_BYTES, PAGE_BYTES, padded
from megatrain.checkpoint.contents import Group, LargeFile, Lent, Part
from megatrain.checkpoint.format import CHUNK_BYTES, FileEntry
from megatrain.errors import os_errors

_log = logging.getLogger(__name__)

NUM_THREADS = 4
"""Threads that write, at most: as many writes are under way at once."""


class ChunkWriter:
    """Threads and buffers that write the large files of one checkpoint after the other.

    All memory that it needs is allocated when it is made.
    """

    def __init__(self, buffer_bytes: int, planned: Sequence[LargeFile]) -> None:
        """Allocate the buffers, and start the threads.

        Args:
            buffer_bytes: The size of all buffers together; at least one chunk is taken, and no more than the
                files have.
            planned: The files of a checkpoint.
        """
        sizes = [file.num_bytes for file in planned]
        self._buffer_bytes = min(CHUNK_BYTES, padded(max(sizes, default=0)))
        num_chunks = sum(-(-size // CHUNK_BYTES) for size in sizes)
        self.num_buffers = max(1, min(num_chunks, buffer_bytes // max(1, self._buffer_bytes)))
        self._free = deque(
            mmap.mmap(-1, max(PAGE_BYTES, self._buffer_bytes)) for _ in range(self.num_buffers)
        )
        for buffer in self._free:
            np.frombuffer(buffer, np.uint8).fill(0)  # its pages are taken now, not when memory is short
        self._changed = threading.Condition()
        self._todo: deque[_Chunk] = deque()
        self._filled: deque[tuple[_Chunk, mmap.mmap]] = deque()
        self._by_block: dict[int, list[_Chunk]] = {}
        self._targets: list[_Target] = []
        self._num_open = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self.waited_s = 0.0
        """Seconds for which changes have waited, since `begin`."""
        self._threads = [
            threading.Thread(target=self._work, name=f"megatrain-save-{number}", daemon=True)
            for number in range(min(NUM_THREADS, self.num_buffers))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.num_buffers * self._buffer_bytes

    @property
    def num_left(self) -> int:
        """The chunks that are still to be written; any thread may ask."""
        return self._num_open

    def begin(
        self,
        directory: Path,
        planned: Iterable[LargeFile],
        order: Sequence[int],
        apart: Collection[int] = (),
    ) -> None:
        """Make the files, and let the threads write them from now on.

        Args:
            directory: The directory of the checkpoint.
            planned: The files.
            order: The blocks in the order in which they will change; those that it lacks come last.
            apart: The blocks that this thread reads, before it returns.

        Raises:
            OutputError: A file cannot be made; nothing is being written.
        """
        assert not self._num_open, "the last checkpoint is still being written"
        lent: dict[Group, Lent] = {}
        targets: list[_Target] = []
        try:
            for file in planned:
                targets.append(_Target(directory / file.name, file))
            self._begin(targets, lent, order, apart)
        except BaseException as error:  # maybe an interrupt: nobody is going to wait for what is begun
            self.fail(error)
            with suppress(BaseException):
                self.wait()
            for target in targets:
                target.abandon()
            raise
        if self._error is not None:  # only this thread may give these back
            for group, each in lent.items():
                if not group.blocks.isdisjoint(apart):
                    each.close()

    def _begin(
        self,
        targets: list[_Target],
        lent: dict[Group, Lent],
        order: Sequence[int],
        apart: Collection[int],
    ) -> None:
        chunks = [chunk for target in targets for chunk in target.chunks(lent)]
        when = {block: number for number, block in enumerate(order)}
        last = len(when)
        chunks.sort(key=lambda chunk: min((when.get(block, last) for block in chunk.blocks), default=last))
        with self._changed:
            self._targets = targets
            self._error, self.waited_s = None, 0.0
            self._todo.extend(chunk for chunk in chunks if chunk.blocks.isdisjoint(apart))
            self._num_open = len(chunks)
            for chunk in chunks:
                for block in chunk.blocks:
                    self._by_block.setdefault(block, []).append(chunk)
            self._changed.notify_all()
        for block in dict.fromkeys(block for chunk in chunks for block in sorted(chunk.blocks)):
            if block in apart:
                self.before_change(block)

    def fail(self, error: BaseException) -> None:
        """Give up what is being written; `wait` raises the error, if none was raised before."""
        with self._changed:
            self._give_up(error)

    def before_change(self, block: int) -> None:
        """Return once nothing of a block is needed any more; in any thread."""
        if block not in self._by_block:  # what is true for nearly every call
            return
        try:
            self._wait_for_change(block)
        except BaseException as error:
            self._let_go(error)
            raise

    def _wait_for_change(self, block: int) -> None:
        began = time.monotonic()
        while (chunk := self._take(block)) is not None:
            try:
                buffer = self._free_buffer(chunk)
            except BaseException:  # an interrupt: somebody else is to copy it
                self._put_back(chunk)
                raise
            if buffer is None:
                break
            self._fill(chunk, buffer, is_urgent=True)
        with self._changed:
            while block in self._by_block and self._error is None:
                self._changed.wait()
            self.waited_s += time.monotonic() - began

    def wait(self) -> dict[str, FileEntry]:
        """Wait until all is written and durable; return the entries of the files by name.

        Raises:
            BaseException: What a thread has raised first; of the files, some are there.
        """
        with self._changed:
            while self._num_open and self._error is None:
                self._changed.wait()
            # those that are in the middle of a write come to an end, before files are closed or removed
            while self._error is not None and any(chunk.holder for chunk in self._chunks()):
                self._changed.wait()
            error, targets = self._error, self._targets
            self._num_open, self._targets, self._error = 0, [], None
        if error is not None:
            for target in targets:
                target.abandon()
            targets.clear()  # the error may be kept for long, and what its frames hold with it
            raise error
        return {target.file.name: target.entry() for target in targets}

    def close(self) -> None:
        """End the threads; nothing is being written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._free.clear()

    # -- chunks ---------------------------------------------------------------------------------------------

    def _chunks(self) -> Iterator[_Chunk]:
        return (chunk for target in self._targets for chunk in target.all_chunks)

    def _take(self, block: int) -> _Chunk | None:
        """Take a chunk of a block that nobody has taken."""
        with self._changed:
            for chunk in self._by_block.get(block, ()):
                if not chunk.is_taken and self._error is None:
                    chunk.is_taken, chunk.holder = True, threading.get_ident()
                    return chunk
        return None

    def _let_go(self, error: BaseException) -> None:
        """Give up what is written if this thread was interrupted with a chunk that nobody else has now."""
        own = threading.get_ident()
        with self._changed:
            held = [chunk for chunk in self._chunks() if chunk.holder == own]
            if held:
                self._give_up(error)
            for chunk in held:
                chunk.holder = None
            self._changed.notify_all()

    def _put_back(self, chunk: _Chunk) -> None:
        with self._changed:
            chunk.is_taken, chunk.holder = False, None
            if self._error is None:
                self._todo.appendleft(chunk)
            self._changed.notify_all()

    def _free_buffer(self, chunk: _Chunk) -> mmap.mmap | None:
        """Wait for a buffer for a chunk; None, and nothing holds the chunk: writing was given up."""
        with self._changed:
            while not self._free and self._error is None:
                self._changed.wait()
            if self._error is None:
                return self._free.popleft()
            chunk.holder = None
            self._changed.notify_all()
            return None

    def _next(self) -> tuple[_Chunk, mmap.mmap, bool] | None:
        """Wait for a chunk to write, with its buffer and whether that is filled; None: it is all over."""
        with self._changed:
            while True:
                if self._filled:
                    filled, buffer = self._filled.popleft()
                    filled.holder = threading.get_ident()
                    return filled, buffer, True
                while self._free and self._todo and self._error is None:
                    chunk = self._todo.popleft()
                    if not chunk.is_taken:
                        chunk.is_taken, chunk.holder = True, threading.get_ident()
                        return chunk, self._free.popleft(), False
                if self._is_closed:
                    return None
                self._changed.wait()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            chunk, buffer, is_filled = found
            if is_filled or self._fill(chunk, buffer):
                self._write(chunk, buffer)
            del found, chunk, buffer  # an idle thread must not keep the last chunk's tensors alive

    def _fill(self, chunk: _Chunk, buffer: mmap.mmap, *, is_urgent: bool = False) -> bool:
        """Copy a chunk's bytes, and let its blocks change; what is urgent is left for a thread to write."""
        try:
            chunk.copy_into(np.frombuffer(buffer, np.uint8))
        except BaseException as error:  # raised by `wait`
            self._fail(error, chunk, buffer)
            if is_urgent and not isinstance(error, Exception):
                raise  # it interrupts the caller, and not only what is written
            return False
        with self._changed:
            for block in chunk.blocks:
                left = self._by_block.get(block)
                if left is None:
                    continue
                if chunk in left:  # or it was given up meanwhile
                    left.remove(chunk)
                if not left:
                    del self._by_block[block]
            if is_urgent:
                self._filled.append((chunk, buffer))
            self._changed.notify_all()
        return True

    def _write(self, chunk: _Chunk, buffer: mmap.mmap) -> None:
        try:
            if self._error is None:
                chunk.write(buffer)
        except BaseException as error:
            self._fail(error, chunk, buffer)
            return
        with self._changed:
            chunk.holder = None
            self._free.append(buffer)
            self._num_open -= 1
            self._changed.notify_all()

    def _fail(self, error: BaseException, chunk: _Chunk, buffer: mmap.mmap) -> None:
        with self._changed:
            chunk.holder = None
            self._free.append(buffer)
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._error = self._error or error
        for chunk, buffer in self._filled:
            chunk.holder = None
            self._free.append(buffer)
        self._filled.clear()
        self._todo.clear()
        self._by_block.clear()
        self._changed.notify_all()


class _Target:
    """One file that is being written."""

    def __init__(self, path: Path, file: LargeFile) -> None:
        self.path, self.file = path, file
        self.all_chunks: list[_Chunk] = []
        self._digests = [""] * -(-file.num_bytes // CHUNK_BYTES)
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

    def chunks(self, lent: dict[Group, Lent]) -> list[_Chunk]:
        """Cut the file; `lent` has the groups met so far, of all files."""
        self.all_chunks = [
            _Chunk(self, number, self.file.parts(start, min(start + CHUNK_BYTES, self.file.num_bytes)), lent)
            for number, start in enumerate(range(0, self.file.num_bytes, CHUNK_BYTES))
        ]
        return self.all_chunks

    def write(self, number: int, data: memoryview, digest: str) -> None:
        """Write a chunk; the last one makes the file durable."""
        assert self._descriptor is not None
        with os_errors("write", self.path):
            _write_at(self._descriptor, data, number * CHUNK_BYTES, self.path, is_direct=self.is_direct)
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


class _Chunk:
    """One chunk of a file: what is copied into it, and which blocks must not change before."""

    def __init__(self, target: _Target, number: int, parts: Iterable[Part], lent: dict[Group, Lent]) -> None:
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
        start = number * CHUNK_BYTES
        self._num_bytes = min(CHUNK_BYTES, target.file.num_bytes - start)
        self._header = target.file.header[start : start + CHUNK_BYTES]

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
