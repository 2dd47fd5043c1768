"""Disks on which a write of some files fails, or does not end."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from megatrain import files


class WatchedWrites(files.FileCalls):
    """Calls `before_write` with the path of what is about to be written, and the number of bytes."""

    def before_write(self, path: str, num_bytes: int) -> None:
        """Do what this stand-in is for."""

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write, or not."""
        self.before_write(os.readlink(f"/proc/self/fd/{descriptor}"), len(data))
        return super().write_at(descriptor, data, offset)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write, or not."""
        self.before_write(os.readlink(f"/proc/self/fd/{descriptor}"), len(data))
        return super().write(descriptor, data)


class FailingWrites(WatchedWrites):
    """Fails each write of what has a part of a name in its path."""

    def __init__(self, name: str, number: int) -> None:
        """Fail with an error of the system, by its number."""
        self._name, self._number = name, number

    def before_write(self, path: str, num_bytes: int) -> None:
        """Fail, or not."""
        if self._name in path:
            raise OSError(self._number, os.strerror(self._number))


class SmallDisk(WatchedWrites):
    """Lets all files below a directory take so many bytes together."""

    def __init__(self, root: Path, num_bytes: int) -> None:
        """Hold writes below a directory."""
        self._root, self._num_bytes = root, num_bytes

    def before_write(self, path: str, num_bytes: int) -> None:
        """Fail, or not."""
        if str(self._root) not in path:
            return
        for parent, _, names in os.walk(self._root):
            for name in names:
                with suppress(FileNotFoundError):
                    num_bytes += os.lstat(os.path.join(parent, name)).st_size
        if num_bytes > self._num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
