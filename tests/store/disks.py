"""Stand-ins for the system of `store/drives` that fail, tear or die, and small stores to try them on."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatrain.store.drives import system as calls
from megatrain.store.drives.drive import staging
from megatrain.store.drives.striped import Extent, StripedStore

CHUNK = 8192
EXTENTS = [Extent("state of block 0", 5 * 4096), Extent("state of block 1", 4096), Extent("head", 3 * CHUNK)]


def make_store(root: Path, num_drives: int = 1, owner: str = "") -> StripedStore:
    """Make a store of three extents in `root`, in as many directories; nothing is opened."""
    return StripedStore(
        [root / f"drive{number}" for number in range(num_drives)], EXTENTS, owner=owner, chunk_bytes=CHUNK
    )


def content(extent: int, step: int) -> Tensor:
    """Make what an extent holds after a step."""
    chance = torch.Generator().manual_seed(1000 * step + extent)
    buffer = staging(EXTENTS[extent].num_bytes)
    buffer.copy_(torch.randint(256, (buffer.numel(),), dtype=torch.uint8, generator=chance))
    return buffer


def write_step(store: StripedStore, step: int, *, commits: bool = True) -> None:
    """Write all extents, and commit them."""
    for extent in range(len(EXTENTS)):
        store.write(extent, content(extent, step))
    if commits:
        store.commit(step, {"step": step})


def read_all(store: StripedStore) -> list[Tensor]:
    """Read every extent."""
    found = [staging(extent.num_bytes) for extent in EXTENTS]
    for number, buffer in enumerate(found):
        store.read(number, buffer)
    return found


def holds(store: StripedStore, step: int) -> bool:
    """Whether every extent is that of a step, bit for bit."""
    pairs = zip(read_all(store), (content(number, step) for number in range(len(EXTENTS))), strict=True)
    return all(torch.equal(found, expected) for found, expected in pairs)


class Counted(calls.DriveCalls):
    """Count the calls that change something, and say before each what it is; nothing is synced."""

    def __init__(self) -> None:
        self.num_calls = 0

    def before(self, call: str, num_bytes: int = 0) -> int:
        """Do what this stand-in is for; returns how many of the bytes may be written."""
        return num_bytes

    def _count(self, call: str, num_bytes: int = 0) -> int:
        allowed = self.before(call, num_bytes)
        self.num_calls += 1
        return allowed

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        allowed = self._count("write", len(buffers[0]))
        return super().pwritev(descriptor, [buffers[0][:allowed]], offset)

    def fallocate(self, descriptor: int, num_bytes: int) -> None:
        self._count("fallocate")
        super().fallocate(descriptor, num_bytes)

    def fdatasync(self, descriptor: int) -> None:
        self._count("fdatasync")

    def fsync(self, descriptor: int) -> None:
        self._count("fsync")

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count("unlink")
        super().unlink(path)


class Failing(Counted):
    """Fail with `number` at every call of one kind, or at the one with this index."""

    def __init__(self, call: str = "", *, at: int = -1, number: int = errno.ENOSPC) -> None:
        super().__init__()
        self._call, self._at, self._number = call, at, number

    def before(self, call: str, num_bytes: int = 0) -> int:
        if call == self._call or self.num_calls == self._at:
            self.num_calls += 1
            raise OSError(self._number, os.strerror(self._number))
        return num_bytes


class Killed(Counted):
    """Die by SIGKILL at call `at`; a write is half done then."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.num_calls == self._at:
            half = len(buffers[0]) // 2 // 4096 * 4096
            if half:
                os.pwritev(descriptor, [buffers[0][:half]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pwritev(descriptor, buffers, offset)

    def before(self, call: str, num_bytes: int = 0) -> int:
        if self.num_calls == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        return num_bytes


class Short(calls.DriveCalls):
    """Transfer at most one page and a bit at a time, as a drive may."""

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(descriptor, [buffers[0][:4096]], offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(descriptor, [buffers[0][:4096]], offset)


class WithoutDirect(calls.DriveCalls):
    """A file system that knows no direct I/O, such as some overlays."""

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags)


class Full(calls.DriveCalls):
    """A drive with little room."""

    def free_bytes(self, path: Path) -> int:
        return 50_000
