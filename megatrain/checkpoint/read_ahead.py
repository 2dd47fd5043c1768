"""Chunks of files that one thread takes in about their order, while others read those that follow.

What must stay true: a buffer is filled anew only when its chunk is none of those that are wanted next, and
after the thread that reads into it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from megatrain.checkpoint.comparison import Chunk

BEHIND = 2
"""Chunks that are kept behind the one that was taken last: tensors do not always come in their order."""


class ReadAhead:
    """Reads chunks into a fixed number of buffers."""

    def __init__(
        self,
        read: Callable[[Chunk, memoryview], object],
        chunks: Sequence[Chunk],
        buffers: Sequence[memoryview],
    ) -> None:
        """Read nothing yet.

        Args:
            read: The function that reads a chunk into a buffer, on any thread, and may raise.
            chunks: The chunks in the order in which they are probably taken.
            buffers: The buffers, `BEHIND` and two or more, each of which holds any chunk. All but those take
                what follows.
        """
        self._read, self._chunks = read, chunks
        self._numbers = {(entry.name, index): number for number, (entry, index) in enumerate(chunks)}
        self._free = list(buffers)
        self._num_ahead = len(buffers) - BEHIND - 1
        self._held: dict[int, tuple[Future[object], memoryview]] = {}
        """Chunks by number, those that were wanted last at the end."""
        self._pool = ThreadPoolExecutor(self._num_ahead, thread_name_prefix="megatrain-reader")

    def take(self, name: str, index: int) -> memoryview:
        """Return a buffer that holds a chunk, to be used before the next call.

        Raises:
            Exception: What `read` has raised.
        """
        number = self._numbers[name, index]
        wanted = range(number, min(number + 1 + self._num_ahead, len(self._chunks)))
        for each in reversed(wanted):  # so that the one to take is the last
            if each in self._held:
                self._held[each] = self._held.pop(each)
        for each in wanted:
            if each not in self._held:
                buffer = self._buffer(wanted)
                self._held[each] = self._pool.submit(self._read, self._chunks[each], buffer), buffer
        done, buffer = self._held[number]
        done.result()
        return buffer

    def close(self) -> None:
        """End the threads; the buffers are free then."""
        self._pool.shutdown(cancel_futures=True)
        self._held = {}

    def _buffer(self, wanted: range) -> memoryview:
        """Return a buffer for a chunk, whose own is none of those that are wanted."""
        if self._free:
            return self._free.pop()
        done, buffer = self._held.pop(next(number for number in self._held if number not in wanted))
        if not done.cancel():
            wait([done])
        return buffer
