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

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from megatrain.checkpoint import format
from megatrain.checkpoint.chunk_files import Chunk, Target
from megatrain.checkpoint.contents import Group, LargeFile, Lent
from megatrain.checkpoint.format import FileEntry
from megatrain.checkpoint.uncopied import LOOK_S, Uncopied
from megatrain.layout.host_buffers import PAGE_BYTES, padded

NUM_THREADS = 4
"""Threads that write, at most: as many writes are under way at once."""


class ChunkWriter:
    """Threads and buffers that write the large files of one checkpoint after the other.

    All memory that it needs is allocated when it is made.
    """

    def __init__(
        self, buffer_bytes: int, planned: Sequence[LargeFile], uncopied: Uncopied | None = None
    ) -> None:
        """Allocate the buffers, and start the threads.

        Args:
            buffer_bytes: The size of all buffers together; at least one chunk is taken, and no more than the
                files have.
            planned: The files of a checkpoint.
            uncopied: What tells other processes, which change blocks too, what they have to wait for; None:
                there are none.
        """
        self._uncopied = uncopied
        sizes = [file.num_bytes for file in planned]
        self._buffer_bytes = min(format.CHUNK_BYTES, padded(max(sizes, default=0)))
        num_chunks = sum(-(-size // format.CHUNK_BYTES) for size in sizes)
        self.num_buffers = max(1, min(num_chunks, buffer_bytes // max(1, self._buffer_bytes)))
        self._free = deque(
            mmap.mmap(-1, max(PAGE_BYTES, self._buffer_bytes)) for _ in range(self.num_buffers)
        )
        for buffer in self._free:
            np.frombuffer(buffer, np.uint8).fill(0)  # its pages are taken now, not when memory is short
        self._changed = threading.Condition()
        self._todo: deque[Chunk] = deque()
        self._filled: deque[tuple[Chunk, mmap.mmap]] = deque()
        self._by_block: dict[int, list[Chunk]] = {}
        self._targets: list[Target] = []
        self._num_open = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self.waited_s = 0.0
        """Seconds for which changes have waited, since `begin`."""
        self.threads = [
            threading.Thread(target=self._work, name=f"megatrain-save-{number}", daemon=True)
            for number in range(min(NUM_THREADS, self.num_buffers))
        ]
        if uncopied is not None:
            serve = threading.Thread(target=self._serve, args=(uncopied,), name="megatrain-save", daemon=True)
            self.threads.append(serve)
        for thread in self.threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.num_buffers * self._buffer_bytes

    @property
    def num_left(self) -> int:
        """The chunks that are still to be written; any thread may ask."""
        return self._num_open

    @property
    def is_at_rest(self) -> bool:
        """Whether `wait` would return at once, or raise, but for writes that are in the middle."""
        return self._error is not None or not self._num_open

    def begin(
        self,
        directory: Path,
        planned: Iterable[LargeFile],
        order: Sequence[int],
        apart: Collection[int] = (),
        passed: Callable[[int], object] = lambda block: None,
    ) -> None:
        """Make the files, and let the threads write them from now on.

        Args:
            directory: The directory of the checkpoint.
            planned: The files.
            order: The blocks in the order in which they will change; those that it lacks come last.
            apart: The blocks that this thread reads, by their numbers, before it returns.
            passed: The function that is called after each of these, of which a file may have nothing, or was
                given up.

        Raises:
            OutputError: A file cannot be made; nothing is being written.
        """
        assert not self._num_open, "the last checkpoint is still being written"
        lent: dict[Group, Lent] = {}
        targets: list[Target] = []
        try:
            for file in planned:
                targets.append(Target(directory / file.name, file))
            self._begin(targets, lent, order, apart, passed)
        except BaseException as error:  # maybe an interrupt: nobody is going to wait for what is begun
            self.fail(error)
            with suppress(BaseException):
                self.wait()
            for target in targets:
                target.abandon()
            raise

    def _begin(
        self,
        targets: list[Target],
        lent: dict[Group, Lent],
        order: Sequence[int],
        apart: Collection[int],
        passed: Callable[[int], object],
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
            if self._uncopied is not None:
                self._uncopied.hold(self._by_block)
            self._changed.notify_all()
        for block in sorted(apart):
            self.before_change(block)
            if self._error is not None:  # only this thread may give these back
                for group, each in lent.items():
                    if not group.blocks.isdisjoint(apart):
                        each.close()
            passed(block)

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
        for thread in self.threads:
            thread.join()
        self._free.clear()

    # -- chunks ---------------------------------------------------------------------------------------------

    def _chunks(self) -> Iterator[Chunk]:
        return (chunk for target in self._targets for chunk in target.all_chunks)

    def _take(self, block: int) -> Chunk | None:
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

    def _put_back(self, chunk: Chunk) -> None:
        with self._changed:
            chunk.is_taken, chunk.holder = False, None
            if self._error is None:
                self._todo.appendleft(chunk)
            self._changed.notify_all()

    def _free_buffer(self, chunk: Chunk) -> mmap.mmap | None:
        """Wait for a buffer for a chunk; None, and nothing holds the chunk: writing was given up."""
        with self._changed:
            while not self._free and self._error is None:
                self._changed.wait()
            if self._error is None:
                return self._free.popleft()
            chunk.holder = None
            self._changed.notify_all()
            return None

    def _next(self) -> tuple[Chunk, mmap.mmap, bool] | None:
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

    def _serve(self, uncopied: Uncopied) -> None:
        """Copy first what other processes wait for."""
        while True:
            with self._changed:
                while not self._by_block and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
            for block in uncopied.wanted():
                self.before_change(block)
            time.sleep(LOOK_S)

    def _fill(self, chunk: Chunk, buffer: mmap.mmap, *, is_urgent: bool = False) -> bool:
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
                    if self._uncopied is not None:
                        self._uncopied.let_go(block)
            if is_urgent:
                self._filled.append((chunk, buffer))
            self._changed.notify_all()
        return True

    def _write(self, chunk: Chunk, buffer: mmap.mmap) -> None:
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

    def _fail(self, error: BaseException, chunk: Chunk, buffer: mmap.mmap) -> None:
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
        if self._uncopied is not None:
            self._uncopied.let_all_go()
        self._changed.notify_all()
