"""One drive: a preallocated file, direct I/O in whole pages, and a pool of threads for each direction.

Reads and writes have threads of their own, so that what is read ahead never queues behind what is written
back. Threads with `preadv` and `pwritev` matched fio with io_uring (`benchmarks/store/nvme.py`) and need no
library; whoever finds otherwise on a faster drive replaces this file, behind `submit_read`, `submit_write`
and the futures that they return.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megatrain.errors import CheckpointError, OutputError, is_full, warn_once
from megatrain.filesystems import named_filesystem
from megatrain.hardware import GIB
from megatrain.hardware.cores import allowed_cpus
from megatrain.layout.host_buffers import PAGE_BYTES
from megatrain.store.drives import system as calls
from megatrain.store.drives.places import STATE_NAME, drive_errors, make_place

_log = logging.getLogger(__name__)

_TRIAL_BYTES = 16 << 20
"""Written and read back to say what buffered I/O costs where direct I/O is not to be had."""


Check = Callable[[memoryview], None]
"""Called in the thread that has read, or is about to write, some bytes."""


def raw(flat: Tensor) -> memoryview:
    """View a contiguous uint8 host tensor as memory."""
    return memoryview(flat.numpy())  # type: ignore[arg-type]


_ALL_THREADS = 8
"""Each drive has 1 to 4 threads for a direction, and all together this many, or as many as cores."""


class Drive:
    """One directory's `state.bin`, or another file there, open for this process, or the ranks of one run."""

    def __init__(
        self, directory: Path, *, num_threads: int, name: str = STATE_NAME, is_shared: bool = False
    ) -> None:
        """Open the file, or make an empty one, and lock it.

        Args:
            directory: The directory, from `check_places`.
            num_threads: The number of threads for reads; there are as many for writes.
            name: The name of the file.
            is_shared: A claim that another rank has it open, and shares it.

        Raises:
            OutputError: The file cannot be opened, or another run uses it.
        """
        self.path = directory / name
        self.num_bytes = 0
        self.is_direct = False
        self._is_closed = False
        make_place(directory)
        with drive_errors("open", self.path):
            self._buffered = calls.system.open(self.path, os.O_RDWR | os.O_CREAT)
        self._descriptor = self._buffered
        self._readers = ThreadPoolExecutor(num_threads, thread_name_prefix=f"read-{directory.name}")
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix=f"write-{directory.name}")
        try:
            self._lock(fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        except BaseException:
            self.close()
            raise

    def share(self) -> None:
        """Let other ranks open the file: until the last of them lets go of it, no other run gets it."""
        self._lock(fcntl.LOCK_SH)

    def take_over(self) -> None:
        """Use the room that the first rank has given the file."""
        with drive_errors("open", self.path):
            self.num_bytes = self.path.stat().st_size
            self.is_direct = self._try_direct()

    def allocate(self, num_bytes: int, *, says_cost: bool = True) -> None:
        """Give the file `num_bytes` bytes, whole pages, of the drive; content that is there stays.

        Args:
            num_bytes: The number of bytes of the whole file.
            says_cost: A claim that what I/O costs here is measured and logged, if it is not direct.

        Raises:
            CapacityError: The drive is full, though it was not when it was checked.
            OutputError: The file cannot be written.
        """
        self.num_bytes = num_bytes
        self._take_room()
        with drive_errors("open", self.path):
            self.is_direct = self._try_direct()
        if not self.is_direct and num_bytes and says_cost:
            self._say_cost()

    def grow(self, num_bytes: int) -> None:
        """Give the open file `num_bytes` bytes in all; nothing is lost if there is no room.

        Raises:
            CapacityError: The drive is full.
            OutputError: The file cannot be written.
        """
        more = num_bytes - self.num_bytes
        with drive_errors(f"take {more:,} bytes more for", self.path):
            try:
                calls.system.fallocate(self._buffered, num_bytes)
            except OSError:
                calls.system.truncate(self._buffered, self.num_bytes)  # what was taken of it
                raise
        self.num_bytes = num_bytes

    def forget_name(self) -> None:
        """Remove the name of the open file: its room is free when this process ends, however it does."""
        with drive_errors("remove", self.path):
            calls.system.unlink(self.path)

    def submit_read(self, buffer: memoryview, offset: int, check: Check | None = None) -> Future[None]:
        """Fill `buffer` from `offset`, then `check` it.

        Both in whole pages, and the buffer at a page's address.
        """
        return self._readers.submit(self._read, buffer, offset, check)

    def submit_write(self, buffer: memoryview, offset: int, check: Check | None = None) -> Future[None]:
        """`check` a buffer, then write it at `offset`, aligned alike; durable after `submit_sync`."""
        return self._writers.submit(self._write, buffer, offset, check)

    def submit_sync(self) -> Future[None]:
        """Make durable what was written and waited for before."""
        return self._writers.submit(self._sync)

    def close(self) -> None:
        """Finish what was submitted, end the threads, and let go of the file; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._readers.shutdown()
        self._writers.shutdown()
        with drive_errors("close", self.path):
            for descriptor in {self._descriptor, self._buffered}:
                calls.system.close(descriptor)

    def _read(self, buffer: memoryview, offset: int, check: Check | None = None) -> None:
        done = 0
        try:
            while done < len(buffer):
                count = calls.system.preadv(self._descriptor, [buffer[done:]], offset + done)
                # a short transfer is legal; what comes next must begin at a page again
                step = count if done + count == len(buffer) else count // PAGE_BYTES * PAGE_BYTES
                if not step:
                    raise OSError(errno.EIO, f"it ends {len(buffer) - done} bytes early")
                done += step
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.path} at byte {offset + done}: {error.strerror}; check this drive, and "
                "resume from the newest checkpoint with another one in memory.tiers.nvme"
            ) from error
        if check is not None:
            check(buffer)

    def _write(self, buffer: memoryview, offset: int, check: Check | None = None) -> None:
        if check is not None:
            check(buffer)
        done = 0
        with drive_errors("write", self.path):
            while done < len(buffer):
                count = calls.system.pwritev(self._descriptor, [buffer[done:]], offset + done)
                step = count if done + count == len(buffer) else count // PAGE_BYTES * PAGE_BYTES
                if not step:
                    raise OSError(errno.EIO, f"it took only {done} of {len(buffer)} bytes")
                done += step

    def _sync(self) -> None:
        with drive_errors("write", self.path):
            calls.system.fdatasync(self._descriptor)

    def _lock(self, kind: int) -> None:
        try:
            fcntl.flock(self._buffered, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{self.path} is in use by another run; wait for it, or name another directory in "
                "memory.tiers.nvme"
            ) from error
        except OSError:
            warn_once(
                _log,
                f"the file system {named_filesystem(self.path)} has no locks here: give its directories "
                "to no other run",
            )

    def _take_room(self) -> None:
        with drive_errors(f"take {self.num_bytes / GIB:.2f} GiB for", self.path):
            try:
                calls.system.truncate(self._buffered, self.num_bytes)
                if self.num_bytes:
                    calls.system.fallocate(self._buffered, self.num_bytes)
            except OSError as error:
                if is_full(error):
                    calls.system.truncate(self._buffered, 0)  # give back what there was
                raise

    def _try_direct(self) -> bool:
        """Open the file for direct I/O if a page can be read that way."""
        if not hasattr(os, "O_DIRECT") or not self.num_bytes:
            return False
        descriptor = -1
        try:
            descriptor = calls.system.open(self.path, os.O_RDWR | os.O_DIRECT)
            calls.system.preadv(descriptor, [memoryview(mmap.mmap(-1, PAGE_BYTES))], 0)
        except OSError as error:
            if descriptor >= 0:
                calls.system.close(descriptor)
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                with drive_errors("open", self.path):
                    raise
            return False
        self._descriptor = descriptor
        return True

    def _say_cost(self) -> None:
        """Measure buffered I/O on a part of the file, and write back what was there."""
        num_bytes = min(self.num_bytes, _TRIAL_BYTES)
        buffer = memoryview(mmap.mmap(-1, num_bytes))
        rates = []
        for work in (lambda: self._read(buffer, 0), lambda: self._write_durably(buffer)):
            cpu_s, start_s = time.process_time(), time.perf_counter()
            work()
            seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
            rates.append(f"{num_bytes / seconds / 1e9:.2f} GB/s at {cpu_s / num_bytes * 1e9:.2f} CPU s/GB")
        _log.warning(
            "%s takes no direct I/O, so its bytes pass the page cache: it reads %s and writes %s, measured "
            "on %d MiB (direct I/O takes about 0.06 CPU s/GB); a drive with ext4 or XFS is better",
            self.path,
            *rates,
            num_bytes >> 20,
        )

    def _write_durably(self, buffer: memoryview) -> None:
        self._write(buffer, 0)
        self._sync()


def staging(num_bytes: int) -> Tensor:
    """Return (num_bytes,) uint8 at a page's address, for small jobs; larger ones use an `Arena`."""
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]


def threads_per_drive(num_drives: int) -> int:
    """Return how many threads read from each drive; as many write."""
    cores = len(allowed_cpus())
    return max(1, min(4, min(cores, _ALL_THREADS) // num_drives))


def close_all(drives: list[Drive]) -> None:
    """Close drives, and forget them."""
    while drives:
        drives.pop().close()


def wait(futures: Iterable[Future[None]]) -> None:
    """Wait for all of them, and then raise what the first one that failed has raised."""
    pending = list(futures)
    errors = [error for future in pending if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
