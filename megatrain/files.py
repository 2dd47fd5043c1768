"""Changes of files that are there after a crash or are not there at all, for this user only.

Every call into the operating system that changes a file or reads a checkpoint back goes through `system`, one
object with one method per call. Tests put an object there that records, fails or dies at the n-th call; code
that went around it would not be tested by them. An `OSError` never leaves this file from a function that
writes: it becomes an `OutputError` that names the path and cause. No file is opened through a link, and one
that is opened for writing has mode 0600, a private directory 0700, whatever the umask.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from megatrain.errors import os_error_of, os_errors, warn_once
from megatrain.filesystems import named_filesystem

logger = logging.getLogger(__name__)

PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700
_TEMPORARY = ".tmp-"
_PIECE_BYTES = 8 * 2**20  # per read or write call: a signal is answered soon, and no buffer is large


class FileCalls:
    """The calls into the operating system, one method each."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file that is no link, or a directory."""
        link = 0 if flags & os.O_DIRECTORY else os.O_NOFOLLOW
        return os.open(path, flags | link | os.O_CLOEXEC, PRIVATE_FILE)

    def restrict(self, descriptor: int, mode: int) -> None:
        """Set the permissions of a file or directory."""
        os.fchmod(descriptor, mode)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of `data`; return the number of written bytes."""
        return os.write(descriptor, data)

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write some of `data` at a place of a file; return the number of written bytes."""
        return os.pwrite(descriptor, data, offset)

    def read(self, descriptor: int, num_bytes: int) -> bytes:
        """Read at most `num_bytes`; nothing at the end of the file."""
        return os.read(descriptor, num_bytes)

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fill a buffer, or its begin, from a place in the file; return the number of read bytes."""
        return os.preadv(descriptor, [buffer], offset)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Cut a file to a size."""
        os.ftruncate(descriptor, num_bytes)

    def fsync(self, descriptor: int) -> None:
        """Wait until a file, or the entries of a directory, are on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def mkdir(self, path: Path, mode: int) -> None:
        """Make a directory that was not there."""
        os.mkdir(path, mode)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name, atomically; a file there is replaced."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)


system = FileCalls()
"""The calls that every function here uses; tests put another object in its place."""


def make_directories(path: Path) -> None:
    """Make a directory for this user only, with missing parents, each durable before the next.

    Raises:
        OutputError: A directory cannot be made, or is a file.
    """
    with os_errors("make the directory", path):
        missing = [level for level in (path, *path.parents) if not level.exists()]
        for level in reversed(missing):
            if level == path:
                make_private_directory(path)
            else:
                system.mkdir(level, 0o777)
            fsync_directory(level.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def make_private_directory(path: Path) -> None:
    """Make a directory that was not there, for this user only.

    Raises:
        OutputError: The directory cannot be made, or something has that name.
    """
    with os_errors("make the directory", path):
        system.mkdir(path, PRIVATE_DIRECTORY)
        if stat.S_IMODE(path.lstat().st_mode) != PRIVATE_DIRECTORY:  # the umask may have removed bits
            path.chmod(PRIVATE_DIRECTORY)


def write_bytes_durably(path: Path, data: bytes) -> None:
    """Put `data` into a file, new or old; a crash leaves the file as it was or as it should be.

    Raises:
        OutputError: The file cannot be written; its old content is still there.
    """
    with replacing(path) as descriptor:
        write_all(descriptor, memoryview(data), path)


def copy_file_durably(source: Path, target: Path) -> None:
    """Copy a file to another directory; durable and all or nothing.

    Raises:
        OutputError: The file cannot be read or written; the old target is still there.
    """
    with replacing(target) as descriptor, os_errors("read", source), opened(source, os.O_RDONLY) as original:
        while piece := system.read(original, _PIECE_BYTES):
            write_all(descriptor, memoryview(piece), target)


def seal_tree(path: Path) -> list[str]:
    """Make the content of a directory durable and private, whoever wrote it; return its files' names.

    Raises:
        OutputError: Something cannot be made so, or is neither a file nor a directory. Nothing there may be
            trusted then, and another try could wrongly succeed.
    """
    with os_errors("write", path):
        names, directories = list_tree(path)
    for name in names:
        with os_errors("write", path / name), opened(path / name, os.O_RDONLY) as descriptor:
            _restrict(descriptor, PRIVATE_FILE, path / name)
            system.fsync(descriptor)
    for name in [*reversed(directories), "."]:  # inner directories sort after their parents
        _restrict_directory(path / name)
        fsync_directory(path / name)
    return names


def fsync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk.

    Raises:
        OutputError: The names cannot be written.
    """
    with (
        os_errors("write the directory", path),
        opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor,
    ):
        try:
            system.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise
            warn_once(
                logger,
                f"the file system {named_filesystem(path)} cannot make names durable: a power cut may lose "
                "new files",
            )


def rename(source: Path, target: Path) -> None:
    """Give a file or directory another name, atomically; durable once the parent directory has been fsynced.

    Raises:
        OutputError: The file or directory cannot be renamed, and has its old name.
    """
    with os_errors(f"rename {source.name} to", target):
        system.rename(source, target)


def remove_tree(path: Path, *, first: str) -> None:
    """Remove a directory with its content, beginning with the file named `first` if it is there.

    Raises:
        OutputError: Something cannot be removed.
    """
    with os_errors("remove", path):
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if os.path.lexists(path / first):
            system.unlink(path / first)
            fsync_directory(path)  # from here on, the rest cannot be taken for whole
        for parent, directories, names in os.walk(path, topdown=False, onerror=_raise):
            for name in names:
                system.unlink(Path(parent, name))
            for name in directories:
                inner = Path(parent, name)
                (system.unlink if inner.is_symlink() else system.rmdir)(inner)
        system.rmdir(path)


def list_tree(path: Path) -> tuple[list[str], list[str]]:
    """List a directory: the relative names of its files and of its directories, sorted, joined by `/`.

    Raises:
        OSError: A directory cannot be read, or holds something that is neither a file nor a directory.
    """
    files: list[str] = []
    directories: list[str] = []
    pending = [""]
    while pending:
        parent = pending.pop()
        with os.scandir(path / parent) as entries:
            for entry in entries:
                name = parent + entry.name
                if entry.is_dir(follow_symlinks=False):
                    directories.append(name)
                    pending.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    files.append(name)
                else:
                    raise OSError(f"{name} is not a regular file")
    return sorted(files), sorted(directories)


def read_bytes(path: Path) -> bytes:
    """Read a small file.

    Raises:
        OSError: The file cannot be read.
    """
    pieces = []
    with opened(path, os.O_RDONLY) as descriptor:
        while piece := system.read(descriptor, _PIECE_BYTES):
            pieces.append(piece)
    return b"".join(pieces)


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file for reading; its tensors are views of a mapping of it.

    Raises:
        OSError: The file cannot be opened, whatever class and words the package has for that.
        SafetensorError: The file is no whole safetensors file.
    """
    from safetensors import safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except Exception as error:
        found = os_error_of(error)
        if found is None:
            raise
        if found.errno is None:  # the package says that there is no such file, whatever the system has said
            with opened(path, os.O_RDONLY):
                found = OSError("it could not be opened, and now it can; try again")
        raise found from error


def read_digests(path: Path, chunk_bytes: int) -> Iterator[tuple[int, str]]:
    """Read a file once; yield the size and the xxh3-128 of each of its chunks.

    Raises:
        OSError: The file cannot be read.
    """
    with opened(path, os.O_RDONLY) as descriptor:
        while True:
            digest, size = xxhash.xxh3_128(), 0
            while size < chunk_bytes:
                piece = system.read(descriptor, min(chunk_bytes - size, _PIECE_BYTES))
                if not piece:
                    break
                digest.update(piece)
                size += len(piece)
            if size == 0:
                return
            yield size, digest.hexdigest()


def temporary_of(name: str) -> str | None:
    """Return the final name of a temporary file; None if `replacing` has made no such file."""
    final, found, token = name.rpartition(_TEMPORARY)
    is_ours = found and final[:1] == "." and len(token) == 8 and set(token) <= set("0123456789abcdef")
    return final[1:] if is_ours else None


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file for the body, and close it."""
    descriptor = system.open(path, flags)
    try:
        yield descriptor
    finally:
        system.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Open a new file for the body to write; then make it durable and give it the name `path`.

    Raises:
        OutputError: The file cannot be written; its old content is still there.
    """
    temporary = path.with_name(f".{path.name}{_TEMPORARY}{secrets.token_hex(4)}")
    with os_errors("write", path):
        descriptor = system.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            with os_errors("write", path):
                _restrict(descriptor, PRIVATE_FILE, path)
            yield descriptor
            with os_errors("write", path):
                system.fsync(descriptor)
        finally:
            with os_errors("write", path):
                system.close(descriptor)
        _replace(path, temporary)
    except BaseException:
        with contextlib.suppress(OSError):
            system.unlink(temporary)
        raise
    fsync_directory(path.parent)


def _replace(path: Path, temporary: Path) -> None:
    """Give a new file its name; a file that has it goes, at once where the file system can do that."""
    with os_errors(f"rename {temporary.name} to", path):
        try:
            system.rename(temporary, path)
        except OSError as error:
            cannot_replace = error.errno in (errno.EEXIST, errno.ENOTSUP, errno.ENOSYS)
            if not cannot_replace or not stat.S_ISREG(path.lstat().st_mode):
                raise
            warn_once(
                logger,
                f"on the file system {named_filesystem(path.parent)} no file can take another's name at "
                "once; a crash at that moment leaves both under names that end with .tmp- and digits",
            )
            old = path.with_name(f".{path.name}{_TEMPORARY}{secrets.token_hex(4)}")
            system.rename(path, old)
            try:
                system.rename(temporary, path)
            except BaseException:  # a Ctrl-C too
                system.rename(old, path)
                raise
            system.unlink(old)


def write_all(descriptor: int, data: memoryview, path: Path) -> None:
    """Write all of `data` to an open file.

    Raises:
        OutputError: The data cannot be written; a part of them may be.
    """
    with os_errors("write", path):
        while len(data):  # a disk may take a part of a write, and report the reason only at the next one
            data = data[system.write(descriptor, data[:_PIECE_BYTES]) :]


def open_to_append(path: Path) -> int:
    """Open a file, new or old and no link, to read it and to append to it.

    Raises:
        OutputError: The file cannot be opened.
    """
    with os_errors("write", path):
        descriptor = system.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            _restrict(descriptor, PRIVATE_FILE, path)
        except BaseException:
            with contextlib.suppress(OSError):
                system.close(descriptor)
            raise
    return descriptor


def _restrict(descriptor: int, mode: int, path: Path) -> None:
    """Set a file's permissions where they differ, since the umask or a user may have changed them."""
    if stat.S_IMODE(os.fstat(descriptor).st_mode) == mode:
        return
    try:
        system.restrict(descriptor, mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):
            raise
        logger.warning("the filesystem of %s has permissions of its own; others may read it", path)


def _restrict_directory(path: Path) -> None:
    with os_errors("write the directory", path), opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        _restrict(descriptor, PRIVATE_DIRECTORY, path)


def _raise(error: OSError) -> None:
    raise error


def matching_names(directory: Path, patterns: Iterable[str]) -> list[str]:
    """Return the names in a directory that match shell patterns, sorted; `Path.glob` hides an OSError."""
    names = os.listdir(directory)
    return sorted({name for pattern in patterns for name in fnmatch.filter(names, pattern)})
