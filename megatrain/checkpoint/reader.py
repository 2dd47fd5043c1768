"""Read the tensors of a checkpoint's files once: each chunk is compared with its digest, and then handed out.

A chunk is read into a buffer of a fixed pool, by one of several threads, past the page cache where the file
system has that. Only what has been compared is copied from there to where it belongs.

What must stay true: no byte leaves a buffer before the digest of its chunk was compared; what was taken from
a header before its chunk was, is compared with that chunk; after `finish`, every chunk has been compared.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatrain import files
from megatrain.checkpoint import format
from megatrain.checkpoint.comparison import (
    Chunk,
    compare,
    every_chunk,
    new_buffer,
    read_chunk,
    threads_for,
)
from megatrain.checkpoint.load import DamagedError, damage_told
from megatrain.checkpoint.read_ahead import BEHIND, ReadAhead
from megatrain.errors import CheckpointError
from megatrain.hardware import host_memory
from megatrain.hardware.readers import in_order
from megatrain.layout.tensor_file import MOST_HEADER_BYTES, TensorPlace, read_places

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

BUFFERS_BYTES = 8 * format.CHUNK_BYTES
"""Bytes that all buffers may take: those of as many chunks as there are threads at most."""
_THREADS_AHEAD = 4
"""Threads that read ahead for one that copies: more would wait for it."""


class Piece(NamedTuple):
    """Bytes of a file, and where they go."""

    name: str
    """The file, as `CheckpointReader` has it."""
    begin: int
    """The byte of the file at which they begin."""
    target: NDArray[np.uint8]
    """The memory that they fill, (number of bytes,)."""


class Tensors:
    """The tensors of a safetensors file, each of which is read when it is asked for."""

    def __init__(self, reader: CheckpointReader, name: str) -> None:
        """Lend those of a file that the reader has open."""
        self._reader, self._name = reader, name

    def get_tensor(self, key: str) -> Tensor:
        """Read a tensor into new memory.

        Raises:
            DamagedError: Something of its chunks is not what the manifest says.
            CheckpointError: The file cannot be read.
        """
        return self._reader._tensor(self._name, key)


class CheckpointReader:
    """Reads files of a checkpoint, and compares those that nobody has compared with the manifest before."""

    def __init__(
        self, path: Path, manifest: format.Manifest | None = None, later: Collection[str] = ()
    ) -> None:
        """Read nothing yet.

        Args:
            path: The directory of the checkpoint.
            manifest: Its manifest, from `verify`; None: there is none, and nothing is compared.
            later: The names of the files in it whose digests have not been compared yet.
        """
        self.path = path
        self._manifest = manifest
        self._chunk_bytes = format.CHUNK_BYTES if manifest is None else manifest.chunk_bytes
        entries = () if manifest is None else manifest.files
        self._entries = {entry.name: entry for entry in entries if entry.name in later}
        self._left = {entry.name: set(range(len(entry.digests))) for entry in self._entries.values()}
        self._headers: dict[str, bytes] = {}
        self._places: dict[str, Mapping[str, TensorPlace]] = {}
        self._buffers: list[memoryview] = []
        self._opened: list[str] = []
        """The files whose tensors are lent."""
        self._reads_ahead: ReadAhead | None = None

    @property
    def later(self) -> Collection[str]:
        """The names of the files that are compared as they are read."""
        return self._entries.keys()

    @property
    def is_done(self) -> bool:
        """Whether all chunks have been compared."""
        return not any(self._left.values())

    def places(self, name: str) -> Mapping[str, TensorPlace]:
        """Return the tensors of a safetensors file by their names; its header alone is read.

        Raises:
            DamagedError: The header is none, and the file not what the manifest says.
            CheckpointError: The file cannot be read, or is no whole safetensors file.
        """
        if name not in self._places:
            with damage_told(self.path):
                entry = self._entry(name)
                try:
                    read = partial(self._read_header, name)
                    self._places[name], self._headers[name] = read_places(read, entry.num_bytes)
                except ValueError as error:
                    self._compare_header(name)
                    raise CheckpointError(
                        f"megatrain cannot read the tensors in {self.path / name}: {error}; restore it, or "
                        "resume from another"
                    ) from error
        return self._places[name]

    def copy(self, pieces: Iterable[Piece], room: int = BUFFERS_BYTES) -> None:
        """Copy bytes of files to where they belong, each from a chunk that was compared; in threads.

        A chunk of which several pieces are wanted is read once. If it raises, some pieces may be filled.

        Args:
            pieces: What to copy.
            room: The bytes that buffers may take; one takes as much as it needs.

        Raises:
            DamagedError: A chunk is not what the manifest says.
            CheckpointError: A file cannot be read.
        """
        wanted: dict[tuple[str, int], list[Piece]] = {}
        for piece in pieces:
            if piece.target.size:
                last = (piece.begin + piece.target.size - 1) // self._chunk_bytes
                for index in range(piece.begin // self._chunk_bytes, last + 1):
                    wanted.setdefault((piece.name, index), []).append(piece)
        with damage_told(self.path):
            self._read(dict(sorted(wanted.items(), key=itemgetter(0))), room)

    @contextlib.contextmanager
    def open_tensors(self, name: str) -> Iterator[Tensors]:
        """Lend the tensors of a file that is compared `later`, of which each is read as it is asked for.

        Chunks that follow the last one are read ahead, in the files that are open, in the order in which they
        were opened; so tensors are best asked for in that order, and in which they lie there.

        Raises:
            DamagedError: As of `places`.
            CheckpointError: As of `places`.
        """
        self.places(name)
        self._end_ahead()  # what it expects lacks this file
        self._opened.append(name)
        try:
            yield Tensors(self, name)
        finally:
            self._opened.remove(name)
            self._end_ahead()

    def _tensor(self, name: str, key: str) -> Tensor:
        """Read a tensor of an open file into new memory."""
        import torch

        place = self._places[name][key]
        raw = torch.empty(place.num_bytes, dtype=torch.uint8)
        target: Any = raw.numpy()
        at, end = place.begin, place.begin + place.num_bytes
        with damage_told(self.path):
            while at < end:
                index = at // self._chunk_bytes
                begin = index * self._chunk_bytes
                stop = min(end, begin + self._chunk_bytes)
                chunk = np.frombuffer(self._ahead().take(name, index), np.uint8)
                target[at - place.begin : stop - place.begin] = chunk[at - begin : stop - begin]
                at = stop
        return raw.view(getattr(torch, place.dtype)).view(place.shape)

    def _ahead(self) -> ReadAhead:
        if self._reads_ahead is None:
            entries = [self._entry(name) for name in self._opened]
            chunks = list(every_chunk(entries))
            size = max(min(self._chunk_bytes, entry.num_bytes) for entry in entries)
            threads = min(threads_for(chunks, self._chunk_bytes), _THREADS_AHEAD)
            room = min(BUFFERS_BYTES, host_memory().available_bytes // 2)
            threads = max(1, min(threads, room // max(1, size) - BEHIND - 1))
            buffers = self._lend(threads + BEHIND + 1, size)
            self._reads_ahead = ReadAhead(self._take, chunks, buffers)
        return self._reads_ahead

    def _end_ahead(self) -> None:
        if self._reads_ahead is not None:
            self._reads_ahead.close()
            self._reads_ahead = None
        self._buffers = []

    def compare_headers(self) -> None:
        """Compare the chunks with headers of tensors: what was taken from them may have led to an error.

        Raises:
            DamagedError: One is not what the manifest says.
            CheckpointError: A file cannot be read.
        """
        with damage_told(self.path):
            for name in self._entries:
                self._compare_header(name)

    @contextlib.contextmanager
    def damage_blamed(self) -> Iterator[None]:
        """Tell of damage in place of the error inside that it has led to.

        Raises:
            DamagedError: A header of tensors is not what the manifest says, or the error inside is one.
        """
        try:
            yield
        except DamagedError:
            raise
        except Exception:
            self.compare_headers()
            raise

    def finish(self) -> None:
        """Compare what has not been read, and let go of the buffers.

        Raises:
            DamagedError: A chunk is not what the manifest says.
            CheckpointError: A file cannot be read.
        """
        if self._manifest is not None:
            with damage_told(self.path):
                for name in self._headers:  # before the rest: these are compared with what was taken of them
                    self._compare_header(name)
                chunks = (chunk for chunk in every_chunk(self._entries.values()) if self._is_left(*chunk))
                compare(self.path, self._manifest, chunks=chunks)
        self._left = {}
        self._buffers = []

    def _is_left(self, entry: format.FileEntry, index: int) -> bool:
        return index in self._left.get(entry.name, ())

    def _entry(self, name: str) -> format.FileEntry:
        """Return what the manifest says of a file, or its size alone if it was compared before."""
        if name not in self._entries or not self._left:
            num_bytes = (self.path / name).stat().st_size
            return format.FileEntry(name=name, num_bytes=num_bytes, digests=())
        return self._entries[name]

    def _read_header(self, name: str, begin: int, end: int) -> bytes:
        buffer = bytearray(end - begin)
        with files.opened(self.path / name, os.O_RDONLY) as descriptor:
            at = 0
            while at < len(buffer):
                count = files.system.read_into(descriptor, memoryview(buffer)[at:], begin + at)
                if not count:
                    raise ValueError("it is no whole safetensors file")
                at += count
        return bytes(buffer)

    def _compare_header(self, name: str) -> None:
        """Compare the chunks of a header that were not compared yet."""
        entry = self._entry(name)
        if not entry.digests or not self._left.get(name):
            return
        end = len(self._headers.get(name, b""))
        if not end:
            length = int.from_bytes(self._read_header(name, 0, min(8, entry.num_bytes)), "little")
            end = min(8 + min(length, MOST_HEADER_BYTES), entry.num_bytes)
        indices = range(-(-end // self._chunk_bytes))
        self._read({(name, index): [] for index in indices if self._is_left(entry, index)})

    def _read(self, wanted: Mapping[tuple[str, int], list[Piece]], room: int = BUFFERS_BYTES) -> None:
        """Read chunks in threads, and copy the pieces that are wanted of them."""
        entries = {name: self._entry(name) for name in dict.fromkeys(name for name, _ in wanted)}
        threads = threads_for([(entries[name], index) for name, index in wanted], self._chunk_bytes)
        size = max((min(self._chunk_bytes, entry.num_bytes) for entry in entries.values()), default=0)
        threads = max(1, min(threads, room // max(1, size)))
        free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for buffer in self._lend(threads, size):
            free.put(buffer)

        def take(chunk: Chunk, pieces: list[Piece]) -> None:
            buffer = free.get()
            try:
                self._take(chunk, buffer, pieces)
            finally:
                free.put(buffer)

        calls = (partial(take, (entries[name], index), pieces) for (name, index), pieces in wanted.items())
        for _ in in_order(calls, threads):
            pass

    def _take(self, chunk: Chunk, buffer: memoryview, pieces: Iterable[Piece] = ()) -> None:
        """Read a chunk into a buffer, compare it, and copy pieces of it."""
        entry, index = chunk
        is_direct = bool(entry.digests)  # what was read before is in the page cache
        num_bytes = read_chunk(self.path, entry, index, self._chunk_bytes, buffer, is_direct=is_direct)
        begin = index * self._chunk_bytes
        end = begin + num_bytes
        header = self._headers.get(entry.name, b"")[begin:end] if entry.digests else b""
        if header != buffer[: len(header)]:
            raise format.FormatError(f"{entry.name} has changed while it was read")
        found: Any = np.frombuffer(buffer, np.uint8)
        for piece in pieces:
            first = max(begin, piece.begin)
            last = min(end, piece.begin + piece.target.size)
            piece.target[first - piece.begin : last - piece.begin] = found[first - begin : last - begin]
        self._left.get(entry.name, set()).discard(index)

    def _lend(self, number: int, num_bytes: int) -> list[memoryview]:
        """Return buffers that hold so many bytes, those of before where they do."""
        if any(len(buffer) < num_bytes for buffer in self._buffers):
            self._buffers = []
        while len(self._buffers) < number:
            self._buffers.append(new_buffer(num_bytes))
        return self._buffers[:number]
