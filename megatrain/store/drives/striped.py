"""Extents of state on one or several drives: striped, in two copies, with a checksum per chunk.

An extent is written and read as a whole; it is cut into chunks, and chunk i of the store is on drive i mod N.
Of several ranks each may move its own chunks of an extent, which all of them call for then.
Each chunk has two places. A write goes to the place that does not hold committed state, so between two
commits an extent may be written any number of times, and a crash at any moment leaves what was committed.
What must stay true: nobody reads an extent while it is written (the callers' buffers see to that).
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megatrain.errors import CheckpointError, OutputError
from megatrain.layout import drive_chunks
from megatrain.layout.host_buffers import PAGE_BYTES
from megatrain.store.drives import system as calls
from megatrain.store.drives.drive import Drive, close_all, raw, staging, threads_per_drive, wait
from megatrain.store.drives.extents import Chunk, Extent, lay_out
from megatrain.store.drives.places import STATE_NAME, check_places, drive_errors, sync_directory
from megatrain.store.drives.record import (
    PREPARED_NAME,
    RECORD_NAME,
    CommitRecord,
    confirm_record,
    read_records,
    remove_records,
    settle_records,
    write_record,
)
from megatrain.store.drives.refusals import damaged_chunk, other_file, other_size
from megatrain.store.drives.tables import Tables, table_bytes


class StripedStore:
    """The state of one run on its drives. Threads may call; those that write and commit take turns."""

    def __init__(
        self,
        directories: Sequence[Path],
        extents: Sequence[Extent],
        *,
        owner: str = "",
        chunk_bytes: int = 0,
        kept: str = "",
        part: tuple[int, int] = (0, 1),
        memory: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Lay extents out; nothing is opened or checked.

        Args:
            directories: The directories, one per drive, in the order of earlier times if the state is to be
                found again.
            extents: The extents that will be stored.
            owner: The owner of the state, by name; state of another owner is neither read nor overwritten.
            chunk_bytes: The number of bytes of a chunk, whole pages; 0: `drive_chunks.CHUNK_BYTES`.
            kept: A description of the part of the state that is kept here, where others keep the rest.
            part: The place of this rank on its node, and the number of the node's ranks.
            memory: The function that returns (bytes,) uint8 zeros that all ranks map; None: there is one
                rank.
        """
        self.directories = list(directories)
        self.extents = list(extents)
        self.chunk_bytes = chunk_bytes or drive_chunks.CHUNK_BYTES
        self._rank, self._num_ranks = part
        assert self.chunk_bytes % PAGE_BYTES == 0
        self._owner = owner
        self._kept = kept
        self._chunks, self.drive_bytes = lay_out(extents, len(directories), self.chunk_bytes)
        num_chunks = sum(map(len, self._chunks))
        need = table_bytes(num_chunks, len(extents))
        zeros = torch.zeros(need, dtype=torch.uint8) if memory is None else memory(need)
        self._tables = Tables(zeros, num_chunks, len(extents))
        self._drives: list[Drive] = []
        weakref.finalize(self, close_all, self._drives)
        self._names: tuple[str, ...] = ()
        self._failure: BaseException | None = None
        self.read_bytes = 0
        self.written_bytes = 0

    @property
    def fingerprint(self) -> str:
        """A digest of what is where."""
        text = f"{self.chunk_bytes} {len(self.directories)} {[(e.name, e.num_bytes) for e in self.extents]}"
        return xxhash.xxh3_128_hexdigest((text + self._kept).encode())

    def check(self) -> list[CommitRecord]:
        """Check the directories and their room before anything is taken, and return what they hold.

        Returns:
            What is committed there, and what is prepared, as far as there is any.

        Raises:
            ConfigError, CapacityError, OutputError: `check_places` refuses.
            OutputError: The state of another run is there.
            CheckpointError: The record is damaged.
        """
        check_places(self.directories, [num_bytes + PAGE_BYTES for num_bytes in self.drive_bytes])
        found = read_records(self.directories[0])
        for record in (record for record in found if record.owner != self._owner):
            raise OutputError(
                f"{self.directories[0]} holds the state of another run ({record.owner or 'no name'}, step "
                f"{record.step}); name another directory in memory.tiers.nvme, or remove {RECORD_NAME} and "
                f"{STATE_NAME} there"
            )
        return found

    def create(self, start: int = 0) -> None:
        """Begin anew: open the drives, and forget what was committed there; `start`: as of `CommitRecord`.

        Raises:
            MegatrainError: `check` or `Drive` refuses.
        """
        self.check()
        with self._opening():
            remove_records(self.directories[0])
            self._names = tuple(f"{start:x}-{secrets.token_hex(8)}" for _ in self._drives)
            for drive, num_bytes, name in zip(self._drives, self.drive_bytes, self._names, strict=True):
                drive.allocate(num_bytes + PAGE_BYTES)
                page = staging(PAGE_BYTES)
                raw(page)[: len(name)] = name.encode()
                drive.submit_write(raw(page), num_bytes).result()

    def resume(self, step: int | None = None) -> CommitRecord:
        """Open the drives, and go on from what is committed there.

        Args:
            step: The number of the step that all nodes hold, committed or prepared, which is to be the
                committed one; None: there is one node.

        Raises:
            CheckpointError: Nothing is committed, or what is committed is of another model, or the
                directories have changed.
            MegatrainError: `check` or `Drive` refuses.
        """
        held = self.check()
        where = self.directories[0]
        found = next((record for record in held if step is None or record.step == step), None)
        if found is None:
            raise CheckpointError(f"{where} has no {RECORD_NAME}: no step was committed there")
        if found.fingerprint != self.fingerprint:
            raise CheckpointError(
                f"the state in {where} is of another model, train.precision, memory.fragments or "
                f"memory.expert_chunks, of another number of drives than {len(found.drives)}, or of other "
                f"nodes; use the settings with which it was written, or remove {RECORD_NAME} there to go on "
                "from the newest checkpoint"
            )
        with self._opening():
            self._names = found.drives
            for drive, num_bytes, name in zip(self._drives, self.drive_bytes, self._names, strict=True):
                if drive.path.stat().st_size != num_bytes + PAGE_BYTES:
                    raise other_size(drive.path)
                drive.allocate(num_bytes + PAGE_BYTES)
                page = staging(PAGE_BYTES)
                drive.submit_read(raw(page), num_bytes).result()
                if bytes(raw(page)[: len(name)]) != name.encode():
                    raise other_file(drive.path, where)
            settle_records(where, found)
            self._take(found)
        return found

    def join(self) -> None:
        """Open the drives that the first rank has begun anew or resumed.

        Raises:
            MegatrainError: `Drive` refuses.
        """
        with self._opening(is_shared=True):
            for drive in self._drives:
                drive.take_over()

    def has(self, extent: int) -> bool:
        """Whether an extent was ever written."""
        return self._tables.current(extent) >= 0

    def spans(self, extent: int, *, is_own: bool) -> Iterator[range]:
        """Yield the bytes of an extent that this rank moves, chunk by chunk; all, if not its own alone."""
        return (range(chunk.start, chunk.stop) for chunk in self._of(extent, is_own=is_own))

    def submit_read(self, extent: int, buffer: Tensor, *, is_own: bool = False) -> list[Future[None]]:
        """Read an extent's newest content into `buffer`, (num_bytes,) uint8 at a page's address.

        Each future raises CheckpointError if its chunk cannot be read or is not what was written.

        Args:
            extent: The number of the extent.
            buffer: The buffer for all of it.
            is_own: A claim that of several ranks this one moves its own chunks alone; each does so.
        """
        copy = self._tables.current(extent)
        assert copy >= 0, f"{self.extents[extent].name} was never written"
        parts = self._parts(extent, buffer, is_own=is_own)
        self.read_bytes += sum(len(part) for _, part in parts)
        return [
            self._drives[chunk.drive].submit_read(
                part, chunk.offsets[copy], partial(self._verify, extent, chunk, copy)
            )
            for chunk, part in parts
        ]

    def submit_write(self, extent: int, buffer: Tensor, *, is_own: bool = False) -> list[Future[None]]:
        """Write an extent into the places without committed content; it is not the newest yet.

        Each future raises OutputError or CapacityError if its chunk cannot be written. Arguments as in
        `submit_read`.
        """
        copy = self._tables.target(extent)
        parts = self._parts(extent, buffer, is_own=is_own)
        self.written_bytes += sum(len(part) for _, part in parts)
        return [
            self._drives[chunk.drive].submit_write(part, chunk.offsets[copy], partial(self._sum, chunk, copy))
            for chunk, part in parts
        ]

    def read(self, extent: int, buffer: Tensor) -> None:
        """Read an extent and wait for it."""
        wait(self.submit_read(extent, buffer))

    def write(self, extent: int, buffer: Tensor, *, is_own: bool = False) -> None:
        """Write an extent and wait until the drives have taken it; as `submit_write`."""
        self.write_all([(extent, buffer)], is_own=is_own)

    def write_all(self, parts: Iterable[tuple[int, Tensor]], *, is_own: bool = False) -> None:
        """Write extents at the same time, and wait until the drives have taken them; as `submit_write`."""
        given = list(parts)
        try:
            wait(
                future
                for extent, buffer in given
                for future in self.submit_write(extent, buffer, is_own=is_own)
            )
        except BaseException as error:
            self._failure = error
            raise
        for extent, _ in given:
            self._tables.settle(extent)

    def commit(self, step: int, meta: Mapping[str, Any], meet: Callable[[], object] | None = None) -> None:
        """Make what is newest of every extent what a crash leaves; of several ranks, the node's first does.

        All of them must have written all of it, and none may write before this has returned.

        Args:
            step: The number of the step.
            meta: The values that are kept with it, in plain JSON.
            meet: The function that waits until every node has prepared its part; None: there is one node.

        Raises:
            OutputError, CapacityError: The state cannot be made durable. What was committed before still is,
                and nothing can be committed any more: an extent may be torn, and after a failed sync the
                system may take lost pages for written ones.
        """
        if self._failure is not None:
            raise OutputError(f"no step can be committed after {self._failure}") from self._failure
        try:
            wait(drive.submit_sync() for drive in self._drives)
            copies = self._tables.newest()
            sums = [
                self._tables.sum(copy, chunk.number) if copy >= 0 else 0
                for copy, chunks in zip(copies, self._chunks, strict=True)
                for chunk in chunks
            ]
            record = CommitRecord(
                owner=self._owner,
                fingerprint=self.fingerprint,
                drives=self._names,
                step=step,
                copies="".join("-" if copy < 0 else str(copy) for copy in copies),
                sums=tuple(sums),
                meta=meta,
                extent_bytes=tuple(extent.num_bytes for extent in self.extents),
                chunk_bytes=self.chunk_bytes,
            )
            if meet is None:
                write_record(self.directories[0], record)
            else:
                write_record(self.directories[0], record, PREPARED_NAME)
                meet()
                confirm_record(self.directories[0])
        except BaseException as error:
            self._failure = error
            raise
        self._tables.commit(copies)

    def close(self) -> None:
        """Let go of the drives; what is committed stays."""
        close_all(self._drives)

    def remove(self) -> None:
        """Let go of the drives, and remove what is there: nothing is committed any more.

        A store that was closed before is left as it is, and of several ranks the first one removes.

        Raises:
            OutputError: A file cannot be removed.
        """
        if not self._drives:
            return
        paths = [drive.path for drive in self._drives]
        self.close()
        if self._rank:
            return
        remove_records(self.directories[0])
        for path in paths:
            with drive_errors("remove", path):
                calls.system.unlink(path)

    @property
    def is_direct(self) -> bool:
        """Whether every drive takes direct I/O."""
        return all(drive.is_direct for drive in self._drives)

    def _of(self, extent: int, *, is_own: bool) -> list[Chunk]:
        chunks = self._chunks[extent]
        if not is_own:
            return chunks
        return [chunk for chunk in chunks if drive_chunks.is_own(chunk.turn, self._rank, self._num_ranks)]

    def _parts(self, extent: int, buffer: Tensor, *, is_own: bool) -> list[tuple[Chunk, memoryview]]:
        """Pair the chunks of an extent with their places in a buffer for all of it."""
        memory = raw(buffer)
        assert len(memory) == self.extents[extent].num_bytes
        return [(chunk, memory[chunk.start : chunk.stop]) for chunk in self._of(extent, is_own=is_own)]

    def _verify(self, extent: int, chunk: Chunk, copy: int, memory: memoryview) -> None:
        if xxhash.xxh3_64_intdigest(memory) != self._tables.sum(copy, chunk.number):
            first = self._chunks[extent][0].number
            path, of = self._drives[chunk.drive].path, self.extents[extent].name
            raise damaged_chunk(path, chunk.number - first, of, chunk.offsets[copy], len(memory))

    def _sum(self, chunk: Chunk, copy: int, memory: memoryview) -> None:
        self._tables.set_sum(copy, chunk.number, xxhash.xxh3_64_intdigest(memory))

    def _take(self, record: CommitRecord) -> None:
        copies = [-1 if copy == "-" else int(copy) for copy in record.copies]
        self._tables.take(copies)
        values = iter(record.sums)
        for copy, chunks in zip(copies, self._chunks, strict=True):
            for chunk in chunks:
                self._tables.set_sum(max(copy, 0), chunk.number, next(values))

    @contextmanager
    def _opening(self, *, is_shared: bool = False) -> Iterator[None]:
        """Open the drives, and let go of them if the context fails; others are let in when it ends."""
        threads = threads_per_drive(len(self.directories))
        try:
            for directory in self.directories:
                self._drives.append(Drive(directory, num_threads=threads, is_shared=is_shared))
                sync_directory(directory)
            yield
            for drive in self._drives if self._num_ranks > 1 and not is_shared else ():
                drive.share()
        except BaseException:
            self.close()
            raise
