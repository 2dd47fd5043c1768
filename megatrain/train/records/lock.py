"""The lock of a run directory, which ends with the process, however it ends.

It is the system's lock of the open directory. A file system that has none, or whose locks other machines do
not see, is named in a warning: no more can be done there, since a file that stands for a lock stays behind
when its process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from megatrain.errors import OutputError, os_errors, warn_once
from megatrain.filesystems import NETWORK, filesystem_of, named_filesystem

_log = logging.getLogger(__name__)

_TRIES = 5
_WAIT_S = 0.02
"""The pause between two tries, since a check by `is_locked` holds the lock for microseconds."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def lock(descriptor: int, path: Path, in_use: Callable[[], OutputError]) -> None:
    """Lock an open directory for this process.

    Args:
        descriptor: The open directory.
        path: Its path, for messages.
        in_use: Makes the error of a directory that another process has locked.

    Raises:
        OutputError: Another process has it, or the lock fails.
    """
    with os_errors("lock the run directory", path):
        for tries_left in reversed(range(_TRIES)):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not tries_left:
                    raise in_use() from error
                time.sleep(_WAIT_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                warn_once(
                    _log,
                    f"the file system {named_filesystem(path)} has no locks here: begin no other run in "
                    f"{path}",
                )
                return
        if filesystem_of(path) in NETWORK:
            warn_once(
                _log,
                f"other machines may not see locks of the file system {named_filesystem(path)}: begin no run "
                f"in {path} from another",
            )


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a directory, or the directory cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two checks disturb none
    except OSError as error:
        return error.errno not in _NO_LOCKS
    finally:
        os.close(descriptor)
    return False


def place_of(descriptor: int) -> Path | None:
    """Return the path at which an open directory is now; None if it was removed, or that cannot be told."""
    try:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return place if os.path.samestat(os.stat(place), os.fstat(descriptor)) else None
    except OSError:
        return None
