"""Exact-size host memory for one plane of model state.

One mapping per plane, private or, with several ranks, shared by those of a node; with huge pages where the
kernel gives them. Never torch's pinned allocator: it rounds to powers of two. Only planes that a device reads
or writes are page-locked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatrain.hardware.accelerators import Vendor
from megatrain.hardware.cores import allowed_cpus
from megatrain.store.drives import system as calls
from megatrain.store.drives.places import drive_errors

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: take pages as a write does, and leave their content as it is."""

_PIECE_BYTES = 64 << 20
"""Memory whose pages one thread takes before the next piece is handed out."""


class _Map(mmap.mmap):
    """Mapped memory, which is unlocked before it is unmapped, should nobody have unlocked it.

    A driver would go on with the old pages where the same address is mapped again.
    """

    locked: tuple[Vendor, int] | None = None
    """Whose driver has locked it, and its address."""

    def unlock(self) -> None:
        """Undo the lock, if there is one."""
        if self.locked is not None:
            (vendor, address), self.locked = self.locked, None
            assert vendor.unlock is not None
            vendor.unlock(address)

    def __del__(self) -> None:
        """Unlock the memory, once the device has done with it."""
        if self.locked is not None:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            self.unlock()


class Arena:
    """`nbytes` of zeroed host memory, handed out as tensor views; freed when the last view is gone."""

    def __init__(self, nbytes: int, file: int | None = None) -> None:
        """Map the memory; pages are taken when first touched.

        Args:
            nbytes: The number of bytes.
            file: The descriptor of memory that several processes map, which is closed here; None: the memory
                is private.
        """
        self.nbytes = nbytes
        self._is_shared = file is not None
        if file is None:
            self._map = _Map(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._map = _Map(file, max(nbytes, 1), flags=mmap.MAP_SHARED)
            os.close(file)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> Tensor:
        """View `numel` elements of `dtype` from `byte_offset` as a (numel,) tensor."""
        return self._bytes[byte_offset : byte_offset + numel * dtype.itemsize].view(dtype)

    def drop(self) -> None:
        """Give the pages back to the system, if none is locked; the memory's content is lost.

        A device would go on writing into the old pages of locked memory while the CPU reads new ones. What
        others map too is theirs to read, and stays.
        """
        if self._map.locked is not None or self._is_shared:
            return
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        else:  # no such call on this system: the bytes stay ours, and their content does not matter
            self._bytes.zero_()

    def give_back(self, part: Tensor) -> None:
        """Give the whole pages of a view, which is not locked, back to the system, with what is there."""
        assert self._map.locked is None
        start = part.data_ptr() - self._bytes.data_ptr()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (start + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < stop and hasattr(mmap, "MADV_DONTNEED"):
            advice = mmap.MADV_REMOVE if self._is_shared else mmap.MADV_DONTNEED
            self._map.madvise(advice, first, stop - first)

    def touch(self) -> None:
        """Take all pages now, in as many threads as there are CPUs; the content stays.

        The kernel clears a page when it is first taken, at a few GB/s in one thread.
        """
        starts = range(0, self.nbytes, _PIECE_BYTES)
        with ThreadPoolExecutor(min(len(allowed_cpus()), len(starts)) or 1) as threads:
            list(threads.map(self._touch, starts))

    def _touch(self, start: int) -> None:
        """Take the pages of the piece at `start`; an older kernel takes them at their first use."""
        nbytes = min(_PIECE_BYTES, self.nbytes - start)
        _madvise()(self._bytes.data_ptr() + start, nbytes, _POPULATE_WRITE)

    def lock(self, vendor: Vendor) -> bool:
        """Page-lock the memory for DMA by a vendor's device; False where the driver refuses, or torch cannot.

        In one range: CUDA does not promise copies that cross from one locked range into another, and blocks
        lie anywhere. The pages are taken before, since a driver takes them in one thread.
        """
        if self.nbytes == 0 or self._map.locked is not None:
            return True
        if vendor.lock is not None:
            self.touch()
        if vendor.lock is None or not vendor.lock(self._bytes.data_ptr(), self.nbytes):
            return False
        self._map.locked = vendor, self._bytes.data_ptr()
        return True

    def unlock(self) -> None:
        """Undo `lock`; the device must be done with the memory."""
        self._map.unlock()


def file_arena(nbytes: int, directory: Path) -> Arena:
    """Return memory whose pages are those of a nameless file, which the kernel writes out where RAM is short.

    Raises:
        CapacityError: The drive has no room.
        OutputError: The file cannot be made.
    """
    with (
        drive_errors(f"take {nbytes:,} bytes of scratch room in", directory),
        tempfile.TemporaryFile(dir=directory) as file,
    ):
        calls.system.fallocate(file.fileno(), max(nbytes, 1))
        return Arena(nbytes, os.dup(file.fileno()))


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """Return the system's `madvise`, which runs beside Python's other threads; it may be missing."""
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is None:
        return lambda address, nbytes, advice: -1
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = call
    return found
