"""The directories that state goes to, checked before anything is taken: what they are, and their room.

Two directories may be on one drive, and then share its room.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatrain.errors import CapacityError, ConfigError, OutputError, is_full
from megatrain.hardware import GIB
from megatrain.hardware.this_machine import free_bytes
from megatrain.store.drives import system as calls

STATE_NAME = "state.bin"
"""The one file of state in each directory."""


@contextlib.contextmanager
def drive_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the body into one sentence: cannot `action` `path`, why, and what to do."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error) or type(error).__name__
        if is_full(error):
            raise CapacityError(
                f"cannot {action} {path}: {cause}; free some space there, or name another drive in "
                "memory.tiers.nvme"
            ) from error
        advice = "check this path and its drive, or name another in memory.tiers.nvme"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "name a directory in memory.tiers.nvme that this user may change"
        raise OutputError(f"cannot {action} {path}: {cause}; {advice}") from error


def check_places(directories: Sequence[Path], needs: Sequence[int]) -> None:
    """Check that each directory can take a file of so many bytes; nothing is made or changed.

    Args:
        directories: The directories, one per drive; one that does not exist is made later, in a parent that
            does.
        needs: The number of bytes of each one's file.

    Raises:
        ConfigError: No directory, or one given twice.
        OutputError: A path that is no directory, or that this user may not write.
        CapacityError: A drive has not that much room.
    """
    if not directories:
        raise ConfigError("memory.tiers.nvme is empty; name at least one directory on a drive")
    rooms: dict[int, tuple[Path, int, int]] = {}
    seen: set[Path] = set()
    for directory, need in zip(directories, needs, strict=True):
        where = _existing(directory)
        real = directory.resolve()
        if real in seen:
            raise ConfigError(f"memory.tiers.nvme names {directory} twice; name each directory once")
        seen.add(real)
        with drive_errors("use the drive of", directory):
            device = os.stat(where).st_dev
            free, taken = calls.system.free_bytes(where), bytes_taken(directory / STATE_NAME)
        first, sum_free, sum_need = rooms.get(device, (directory, free, 0))
        rooms[device] = (first, sum_free + taken, sum_need + need)
    for directory, free, need in rooms.values():
        if need > free:
            raise CapacityError(
                f"the drive of {directory} has {free:,} bytes free, but the state needs {need:,} bytes "
                f"({need / GIB:.2f} GiB) there (two copies, so that a crash leaves one whole); free some "
                "space, or name one more drive in memory.tiers.nvme"
            )


def room_of(directories: Sequence[Path]) -> int:
    """Return the bytes that state may take in directories over which it is striped evenly.

    What an earlier run's state holds there counts as free, and directories on one drive share its room. The
    drive with least room for each of its directories decides.

    Args:
        directories: The directories, at least one; of one that does not exist, the nearest parent counts.

    Raises:
        ConfigError: The free space of one is not known.
    """
    drives: dict[int, list[int]] = {}
    places = list(dict.fromkeys(each.resolve() for each in directories))
    for directory in places:
        where = next(level for level in (directory, *directory.parents) if level.is_dir())
        drive = drives.setdefault(os.stat(where).st_dev, [free_bytes(where)])
        drive.append(bytes_taken(directory / STATE_NAME))
    return len(places) * min(sum(drive) // (len(drive) - 1) for drive in drives.values())


def make_place(directory: Path) -> None:
    """Make a directory of `check_places` that is not there.

    Raises:
        OutputError: The directory cannot be made.
    """
    with drive_errors("make the directory", directory):
        if not directory.is_dir():
            directory.mkdir(mode=0o700, exist_ok=True)  # another node may make it, where they share it
            sync_directory(directory.absolute().parent)


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the drive.

    Raises:
        OutputError: The names are not on the drive.
    """
    with drive_errors("write the directory", directory):
        descriptor = calls.system.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            calls.system.fsync(descriptor)
        finally:
            calls.system.close(descriptor)


def _existing(directory: Path) -> Path:
    """Return the directory, or the parent in which it can be made."""
    with drive_errors("use", directory):
        if not directory.exists():
            if not directory.absolute().parent.is_dir():
                raise FileNotFoundError(errno.ENOENT, "neither it nor its parent directory exists")
            where = directory.absolute().parent
        elif not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        else:
            where = directory
        if not os.access(where, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return where


def bytes_taken(file: Path) -> int:
    """Return the bytes that an earlier run's file holds on the drive already: it is used again."""
    return file.stat().st_blocks * 512 if file.is_file() else 0
