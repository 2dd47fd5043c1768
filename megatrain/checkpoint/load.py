"""Find the checkpoints of a run, and prove one whole; `reader` reads its tensors.

What must stay true: names, sizes and the digests of all files have been compared when a checkpoint is said to
be whole, but for the digests of those that the caller wants to compare as it loads them; nothing damaged is
passed over without a word. Reading changes no file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from megatrain import files
from megatrain.checkpoint import format
from megatrain.checkpoint.comparison import check_size, compare, every_chunk
from megatrain.errors import CheckpointError, os_errors, os_sentence

_DAMAGE = (None, errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""The errors with which reading a damaged or missing file ends; another error says nothing about the file."""


class DamagedError(CheckpointError):
    """A checkpoint that is not what its manifest says; `reason` is the clause that names the file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"checkpoint {path} is damaged: {reason}; restore it from a copy or resume from another"
        )
        self.path = path
        self.reason = reason


def find(root: Path) -> list[Path]:
    """List the directories in `root` that have the name of a checkpoint, newest first, whole or not.

    Raises:
        CheckpointError: `root` is there and cannot be read.
    """
    with os_errors("read the checkpoints in", root, CheckpointError):
        try:
            names = os.listdir(root)
        except FileNotFoundError:
            return []
        found = [
            (key, root / name) for name in names if (key := format.parse_directory_name(name)) is not None
        ]
        return [path for _, path in sorted(found, reverse=True) if _is_directory(path)]


def step_of(path: Path) -> int:
    """Return the step of a checkpoint that `find` has listed."""
    name = format.parse_directory_name(path.name)
    assert name is not None, path
    return name[0]


def find_step(root: Path, step: int) -> Path | None:
    """Return the newest checkpoint of a step, whole or not; None: there is none.

    Raises:
        CheckpointError: The directory is refused, as by `find`.
    """
    return next((path for path in find(root) if step_of(path) == step), None)


def verify(
    path: Path,
    *,
    digests: bool = True,
    is_later: Callable[[str], bool] = lambda name: False,
    passed: Callable[[int], None] = lambda num_bytes: None,
) -> format.Manifest:
    """Compare every file of a checkpoint with the manifest, and return the manifest.

    Args:
        path: The checkpoint directory, under its own name or any name of the user's.
        digests: Whether to read the files; False compares names and sizes only.
        is_later: Says of the name of a file whether it is not read now, since it will be compared as it is
            loaded.
        passed: Called with the number of bytes that were found right, again and again.

    Raises:
        DamagedError: A file is missing, too many, of another size or of other bytes; the message names it,
            and the chunk of it.
        CheckpointError: There is no such directory, a later version of megatrain wrote it, or the system does
            not let it be read.
    """
    with damage_told(path):
        if not _is_directory(path):
            raise CheckpointError(
                f"there is no checkpoint directory {path}; check the path, or resume from another"
            )
        manifest = _verify(path)
        if digests:
            now = every_chunk(entry for entry in manifest.files if not is_later(entry.name))
            compare(path, manifest, passed, chunks=now)
        return manifest


@contextlib.contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """Name a checkpoint in the errors inside about the contents of its files, and about reading them.

    Raises:
        DamagedError: A file is damaged or missing.
        CheckpointError: A later version of megatrain wrote it, or the system does not let it be read.
    """
    try:
        yield
    except format.NewerFormatError as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {error}; install the megatrain that wrote it"
        ) from error
    except format.FormatError as error:
        raise DamagedError(path, str(error)) from error
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        if error.errno not in _DAMAGE:  # such as too many open files: the checkpoint may well be whole
            raise CheckpointError(os_sentence(f"read {name} of", path, error)) from error
        reason = f"{name} cannot be read: {error.strerror}" if error.strerror else str(error)
        raise DamagedError(path, reason) from error


def newest_whole(
    root: Path,
    *,
    warn: Callable[[str], None],
    digests: bool = True,
    is_later: Callable[[str], bool] = lambda name: False,
    damaged: Mapping[Path, str] = MappingProxyType({}),
) -> tuple[Path, format.Manifest] | None:
    """Return the newest checkpoint that is whole, with its manifest; None if there is no checkpoint at all.

    Args:
        root: The directory of the run's checkpoints.
        warn: Called with one sentence for each damaged checkpoint that is passed over.
        digests: A claim that digests are compared too, as in `verify`.
        is_later: Says of the name of a file whether it is compared later, as in `verify`.
        damaged: The checkpoints that were found damaged as they were loaded, with the reasons.

    Raises:
        CheckpointError: There are checkpoints, and none is whole; or the newest whole one is of a later
            version, and going on from an older one would lose its steps.
    """
    paths = find(root)
    reasons = []
    for index, path in enumerate(paths):
        try:
            if path in damaged:
                raise DamagedError(path, damaged[path])
            return path, verify(path, digests=digests, is_later=is_later)
        except DamagedError as error:
            reasons.append(f"{path.name} ({error.reason})")
            if index + 1 < len(paths):
                before = paths[index + 1].name
                warn(f"checkpoint {path} is damaged: {error.reason}; trying the one before it, {before}")
    if paths:
        raise CheckpointError(
            f"no checkpoint in {root} is whole: {', '.join(reasons)}; restore one from a copy, or move them "
            "away and start again"
        )
    return None


def _verify(path: Path) -> format.Manifest:
    """Compare the names and sizes of the files with the manifest."""
    manifest = format.parse_manifest(_read_manifest(path))
    named = format.parse_directory_name(path.name)
    if named is not None and named[0] != manifest.step:
        raise format.FormatError(f"{format.MANIFEST_NAME} is that of step {manifest.step}")
    present, _ = files.list_tree(path)
    listed = {entry.name for entry in manifest.files}
    extra = [name for name in present if name not in listed and name != format.MANIFEST_NAME]
    for entry in manifest.files:
        if entry.name not in present:
            also = f", and {extra[0]} is there without being listed" if extra else ""
            raise format.FormatError(f"{entry.name} is missing{also}")
        check_size(path, entry)
    if extra:
        raise format.FormatError(f"{extra[0]} is not in {format.MANIFEST_NAME}")
    return manifest


def _is_directory(path: Path) -> bool:
    """Say whether there is a directory; unlike `Path.is_dir`, any trouble but its absence is an error."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _read_manifest(path: Path) -> bytes:
    name = path / format.MANIFEST_NAME
    try:
        status = name.lstat()
    except FileNotFoundError:
        raise format.FormatError(f"{format.MANIFEST_NAME} is missing") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size > format.MANIFEST_BYTES_MAX:
        raise format.FormatError(f"{format.MANIFEST_NAME} is not a file of a manifest's size")
    return files.read_bytes(name)
