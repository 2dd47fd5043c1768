"""The rates of a drive's reads and writes past the page cache, by size of a block and number of threads.

The file that is written has no name from its first byte on, so nothing of it is left however this ends.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import ConfigError
from megatrain.hardware.memory import GIB
from megatrain.hardware.this_machine import DriveRates, free_bytes

BLOCKS = (1 << 20, 4 << 20, 16 << 20)
THREADS = (1, 2, 4, 8)
FILE_BYTES = GIB
_CACHED_FILE_BYTES = 128 << 20
"""The size of a file that is read through the page cache: a slow drive flushes it in seconds."""
_FILL_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveCell:
    """Rates with blocks of one size and a number of threads."""

    block_bytes: int
    num_threads: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveBench:
    """All cells, and what became of the best while it read and wrote at once."""

    cells: tuple[DriveCell, ...]
    file_bytes: int
    is_direct: bool
    is_duplex: bool

    @property
    def rates(self) -> DriveRates:
        """Return the best of each way."""
        return DriveRates(
            read_bytes_per_s=max(cell.read_bytes_per_s for cell in self.cells),
            write_bytes_per_s=max(cell.write_bytes_per_s for cell in self.cells),
            is_direct=self.is_direct,
            is_duplex=self.is_duplex,
        )


def measure_drive(
    directory: Path,
    *,
    file_bytes: int = FILE_BYTES,
    blocks: Sequence[int] = BLOCKS,
    threads: Sequence[int] = THREADS,
    cell_s: float = 0.7,
) -> DriveBench:
    """Write and read a file in a directory, with direct I/O where the file system has it.

    The file is as large as asked or a quarter of the free space, whichever is less, and filled once before
    the clock runs: the first write of an extent costs more. It is small beside a drive's own cache, so what
    a drive sustains may be less. Writes end with a flush, which is part of their time.

    Args:
        directory: where the file is; must exist.
        file_bytes: of the file.
        blocks: bytes of a transfer; multiples of 4096.
        threads: numbers of threads.
        cell_s: seconds of each cell and way.

    Raises:
        ConfigError: The directory cannot be written, or has no room.
    """
    largest = max(blocks)
    room = min(file_bytes, free_bytes(directory) // 4) // largest * largest
    if room < largest:
        raise _unmeasured(directory, f"not enough space is free: {4 * largest} bytes are needed")
    descriptor, is_direct = _open_nameless(directory)
    try:
        if not is_direct:
            room = min(room, max(largest, _CACHED_FILE_BYTES // largest * largest))
        os.posix_fallocate(descriptor, 0, room)
        bench = _Transfers(descriptor, room, is_direct)
        bench.fill(largest, _FILL_S)
        cells = tuple(bench.cell(block, count, cell_s) for block in blocks for count in threads)
        is_duplex = bench.is_duplex(cells, cell_s)
    except OSError as error:
        raise _unmeasured(directory, error.strerror) from error
    finally:
        os.close(descriptor)
    return DriveBench(cells=cells, file_bytes=bench.file_bytes, is_direct=is_direct, is_duplex=is_duplex)


def _unmeasured(directory: Path, why: str | None) -> ConfigError:
    return ConfigError(
        f"the drive of {directory} cannot be measured ({why}); give another directory with --path"
    )


def _open_nameless(directory: Path) -> tuple[int, bool]:
    """Open a new file, direct if possible, and take its name away at once."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".megatrain-doctor-", dir=directory)
    except OSError as error:
        raise _unmeasured(directory, error.strerror) from error
    try:
        direct = os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            os.close(descriptor)
            raise _unmeasured(directory, error.strerror) from error
        return descriptor, False
    else:
        os.close(descriptor)
        return direct, True
    finally:
        os.unlink(name)


class _Transfers:
    """Reads and writes of one open file."""

    def __init__(self, descriptor: int, file_bytes: int, is_direct: bool) -> None:
        self._descriptor = descriptor
        self.file_bytes = file_bytes
        self._is_direct = is_direct

    def fill(self, block: int, seconds: float) -> None:
        """Write every byte once; of a slow drive, go on with what was written in time."""
        filled = self._run(os.pwritev, block, 2, seconds=seconds, moves=self.file_bytes // block)
        os.fdatasync(self._descriptor)
        self.file_bytes = filled

    def cell(self, block: int, num_threads: int, seconds: float) -> DriveCell:
        """Measure one size with one number of threads: writes, then reads."""
        return DriveCell(
            block_bytes=block,
            num_threads=num_threads,
            write_bytes_per_s=self.write(block, num_threads, seconds),
            read_bytes_per_s=self.read(block, num_threads, seconds),
        )

    def write(self, block: int, num_threads: int, seconds: float) -> float:
        """Return bytes/s of writes, their flush included."""
        began_s = time.perf_counter()
        moved = self._run(os.pwritev, block, num_threads, seconds=seconds)
        os.fdatasync(self._descriptor)
        return moved / (time.perf_counter() - began_s)

    def read(self, block: int, num_threads: int, seconds: float) -> float:
        """Return bytes/s of reads; those through the page cache begin with an empty one."""
        if not self._is_direct:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.perf_counter()
        moved = self._run(os.preadv, block, num_threads, seconds=seconds)
        return moved / (time.perf_counter() - began_s)

    def is_duplex(self, cells: Sequence[DriveCell], seconds: float) -> bool:
        """Return whether reads and writes at once both keep 0.8 of what they reach alone."""
        best = max(cells, key=lambda cell: cell.read_bytes_per_s + cell.write_bytes_per_s)
        with ThreadPoolExecutor(1) as pool:
            reads = pool.submit(self.read, best.block_bytes, best.num_threads, seconds)
            written = self.write(best.block_bytes, best.num_threads, seconds)
        return reads.result() >= 0.8 * best.read_bytes_per_s and written >= 0.8 * best.write_bytes_per_s

    def _run(
        self,
        operation: Callable[[int, list[mmap.mmap], int], int],
        block: int,
        num_threads: int,
        *,
        seconds: float,
        moves: float = math.inf,
    ) -> int:
        """Move blocks in their order, by several threads, for some time or a number of times.

        Returns:
            The bytes moved: a beginning of the file, whole, if it was not gone around.
        """
        stop_s, places = time.perf_counter() + seconds, itertools.count()

        def work() -> int:
            moved = 0
            with mmap.mmap(-1, block) as buffer:
                buffer.write(os.urandom(min(block, 1 << 20)) * (block // min(block, 1 << 20)))
                while True:
                    place = next(places)
                    if place >= moves:
                        return moved
                    moved += self._move(operation, buffer, place * block % self.file_bytes, block)
                    if time.perf_counter() >= stop_s:
                        return moved

        with ThreadPoolExecutor(num_threads) as pool:
            return sum(future.result() for future in [pool.submit(work) for _ in range(num_threads)])

    def _move(
        self,
        operation: Callable[[int, list[mmap.mmap], int], int],
        buffer: mmap.mmap,
        offset: int,
        block: int,
    ) -> int:
        done = operation(self._descriptor, [buffer], offset)
        if done != block:  # not seen; a drive that does this is not one to measure
            raise OSError(errno.EIO, f"{done} of {block} bytes moved")
        return done
