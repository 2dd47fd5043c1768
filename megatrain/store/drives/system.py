"""The calls into the operating system that state on drives takes, one method each.

Everything in this folder goes through `system`, so that tests can put an object there that fails, tears or
dies at a chosen call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class DriveCalls:
    """The calls into the operating system."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file; a new one is for this user only."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read some bytes at `offset`; return how many, 0 at the end of the file."""
        return os.preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write some bytes at `offset`; return how many."""
        return os.pwritev(descriptor, buffers, offset)

    def fallocate(self, descriptor: int, num_bytes: int) -> None:
        """Give a file its blocks on the drive, so that no later write can lack room."""
        os.posix_fallocate(descriptor, 0, num_bytes)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Set a file's size."""
        os.ftruncate(descriptor, num_bytes)

    def fdatasync(self, descriptor: int) -> None:
        """Wait until a file's content is on the drive."""
        os.fdatasync(descriptor)

    def fsync(self, descriptor: int) -> None:
        """Wait until a file, or the names in a directory, are on the drive."""
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, atomically; a file there is replaced."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that this user may still take on the drive of a directory."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


system = DriveCalls()
"""What every function of this folder calls; tests put another object in its place."""
