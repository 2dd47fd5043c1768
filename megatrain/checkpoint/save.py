"""Write a checkpoint so that it is whole or absent after a crash at any point, then let go of old ones.

What must stay true: everything in the new directory is on the disk before the manifest is written, the
manifest is before the one rename that commits, and the rename is before anything old is touched. Until then
the old checkpoints are as they were; after it the new one is whole. A disk that is full is the exception:
what the new one would have made unnecessary goes then, but never the newest that is whole. `save` returns
when all of that is done; `Saver` writes the files while training goes on, to the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatrain import files
from megatrain.checkpoint import format, load
from megatrain.errors import CheckpointError, OutputError, is_full, os_errors


class RoomMadeError(OutputError):
    """A checkpoint found no room, and what it would have made unnecessary is removed: another may find it."""


class LeftOverError(OutputError):
    """A checkpoint is whole, and an older one cannot be removed; `path` is the new one."""

    def __init__(self, path: Path, error: OutputError) -> None:
        super().__init__(f"{path} is saved and whole, but an older checkpoint is in the way: {error}")
        self.path = path


def save(
    root: Path,
    *,
    step: int,
    write: Callable[[Path], None],
    meta: Mapping[str, Any],
    keep_last: int,
    keep_too: Collection[int] = (),
    keep_until: Collection[int] = (),
) -> Path:
    """Write the checkpoint of a step, commit it, and remove what is older than the newest `keep_last` steps.

    Saving a step again keeps what is there if it is whole and equal, and otherwise commits beside it before
    the old one goes. Checkpoints of later steps, left by a run that was taken back to an earlier one, are not
    touched.

    Args:
        root: The directory of the run's checkpoints; made if it is not there.
        step: Optimizer steps that the state has been through.
        write: Puts the files of the checkpoint into the directory that it is given, in subdirectories if it
            likes.
        meta: Plain JSON values with string keys for the manifest.
        keep_last: The number of steps to keep, 1 or more.
        keep_too: Steps to keep beside these, however old.
        keep_until: Steps to keep beside these until this one is whole.

    Returns:
        The directory of the whole checkpoint.

    Raises:
        RoomMadeError: The disk is full, and what this checkpoint would have made unnecessary is removed.
        OutputError: Something cannot be written. No earlier checkpoint has changed, unless the message says
            that the new one is whole and an old one cannot be removed.
    """
    assert step >= 0, step
    with room_made(root, step, keep_last, {*keep_too, *keep_until}):
        temporary = begin(root, step)
        with removed_on_error(temporary):
            with os_errors("write the checkpoint", temporary):
                write(temporary)
            path = commit(temporary, step=step, meta=meta)
    let_go(path, keep_last, keep_too)
    return path


@contextlib.contextmanager
def room_made(root: Path, step: int, keep_last: int, keep_too: Collection[int]) -> Iterator[None]:
    """Remove what the checkpoint of a step would make unnecessary if the disk proves full inside.

    The newest checkpoint with the bytes that were saved stays in any case; without one, nothing goes.

    Raises:
        RoomMadeError: The disk is full, and something was removed.
        OutputError: What is raised inside, if nothing was removed.
    """
    try:
        yield
    except OutputError as error:
        if not is_full(error):
            raise
        gone: list[str] = []
        with contextlib.suppress(OutputError, CheckpointError):  # that the disk is full is what to tell
            whole = _whole(root, step)
            old = _unnecessary(whole, step, keep_last, keep_too)
            sound = next(filter(_is_sound, whole), None) if old else None
            for path in old if sound is not None else ():
                if path != sound:
                    _remove(root, [path])
                    gone.append(path.name)
        if not gone:
            raise
        raise RoomMadeError(f"{error}. To make room, {' and '.join(gone)} went before its time") from error


@contextlib.contextmanager
def removed_on_error(temporary: Path) -> Iterator[None]:
    """Remove a directory after an error inside."""
    try:
        yield
    except BaseException:
        # Best effort: the next save removes what is left, and the first error is the one to tell.
        with contextlib.suppress(OutputError):
            if temporary.exists():
                files.remove_tree(temporary, first=format.MANIFEST_NAME)
        raise


def let_go(path: Path, keep_last: int, keep_too: Collection[int]) -> None:
    """Remove the checkpoints that a new one makes unnecessary.

    Raises:
        LeftOverError: One cannot be removed; the new one is whole.
    """
    try:
        retain(path, keep_last=keep_last, keep_too=keep_too)
    except OutputError as error:
        raise LeftOverError(path, error) from error


def begin(root: Path, step: int) -> Path:
    """Remove what earlier crashes left, and make the directory that the files of a checkpoint go into."""
    files.make_directories(root)
    remove_leftovers(root)
    temporary = root / format.temporary_name("tmp", format.directory_name(step), secrets.token_hex(4))
    files.make_private_directory(temporary)
    return temporary


def remove_leftovers(root: Path) -> None:
    """Remove the directories of saves and removals that were interrupted.

    Raises:
        OutputError: One cannot be removed.
    """
    with os_errors("read the directory", root):
        if not root.exists():
            return
        for path in (root / name for name in sorted(os.listdir(root)) if format.is_leftover(name)):
            if path.is_dir() and not path.is_symlink():
                files.remove_tree(path, first=format.MANIFEST_NAME)


def commit(
    temporary: Path,
    *,
    step: int,
    meta: Mapping[str, Any],
    known: Mapping[str, format.FileEntry] = MappingProxyType({}),
) -> Path:
    """Make a written directory durable, describe it in a manifest, and give it its name.

    Files that are not `known`, as they were summed up while they were written, are read back.

    Raises:
        OutputError: Something cannot be written or read, or a known file is not there.
    """
    names = files.seal_tree(temporary)
    assert all(map(format.is_relative_name, names)), names
    if absent := sorted(known.keys() - set(names)):  # another machine has written it
        raise OutputError(f"{temporary / absent[0]} was written, but cannot be seen from here")
    with os_errors("read back the checkpoint", temporary):
        entries = tuple(known[name] if name in known else _describe(temporary, name) for name in names)
    manifest = format.Manifest(step=step, meta=meta, files=entries, chunk_bytes=format.CHUNK_BYTES)
    encoded = format.encode_manifest(manifest)
    root = temporary.parent
    with os_errors("read the directory", root):
        there = sorted(filter(None, map(format.parse_directory_name, os.listdir(root))))
    attempts = [0, *(attempt for other, attempt in there if other == step)]
    path = root / format.directory_name(step, max(1, attempts[-1]))
    if _is_same(path, encoded):
        files.remove_tree(temporary, first=format.MANIFEST_NAME)
        return path
    # Above every attempt that is there, so that `find` puts it first, and no two renames are needed.
    path = root / format.directory_name(step, attempts[-1] + 1)
    files.write_bytes_durably(temporary / format.MANIFEST_NAME, encoded)
    files.rename(temporary, path)
    files.fsync_directory(root)
    return path


def retain(newest: Path, *, keep_last: int, keep_too: Collection[int] = ()) -> None:
    """Remove the checkpoints that `newest`, just committed, makes unnecessary.

    A directory counts, and may be removed, only if its name and its manifest say that it is a checkpoint of
    ours and all its files are there in their sizes; a damaged one is left for its owner to look at.
    """
    root, saved = newest.parent, format.parse_directory_name(newest.name)
    assert saved is not None, newest
    others = [path for path in _whole(root, saved[0]) if path != newest]
    _remove(root, _unnecessary(others, saved[0], keep_last, keep_too))


def _whole(root: Path, step: int) -> list[Path]:
    """List the checkpoints of a step and of earlier ones that are complete, the newest first."""
    found = (path for path in load.find(root) if load.step_of(path) <= step and not path.is_symlink())
    return [path for path in found if _is_complete(path)]


def _unnecessary(paths: Sequence[Path], step: int, keep_last: int, keep_too: Collection[int]) -> list[Path]:
    """List which of some checkpoints, the newest first, go once that of a step is whole, beside these."""
    assert keep_last >= 1, keep_last
    kept_steps = [step]
    kept_too: list[int] = []
    unnecessary = []
    for path in paths:
        of = load.step_of(path)
        if of not in kept_steps and len(kept_steps) < keep_last:
            kept_steps.append(of)
        elif of in keep_too and of not in {*kept_steps, *kept_too}:
            kept_too.append(of)
        else:
            unnecessary.append(path)
    return unnecessary


def _remove(root: Path, unnecessary: Sequence[Path]) -> None:
    """Remove checkpoints, the last one first."""
    trash = []
    for path in reversed(unnecessary):
        trash.append(root / format.temporary_name("trash", path.name, secrets.token_hex(4)))
        files.rename(path, trash[-1])
    if trash:
        files.fsync_directory(root)
    for path in trash:
        files.remove_tree(path, first=format.MANIFEST_NAME)


def _describe(directory: Path, name: str) -> format.FileEntry:
    """Read a file back and sum it up."""
    chunks = list(files.read_digests(directory / name, format.CHUNK_BYTES))
    digests = tuple(digest for _, digest in chunks)
    return format.FileEntry(name=name, num_bytes=sum(size for size, _ in chunks), digests=digests)


def _is_same(path: Path, encoded: bytes) -> bool:
    """Say whether a checkpoint is whole and has this very manifest."""
    try:
        return format.encode_manifest(load.verify(path)) == encoded
    except CheckpointError:
        return False


def _is_sound(path: Path) -> bool:
    return _is_complete(path, digests=True)


def _is_complete(path: Path, *, digests: bool = False) -> bool:
    try:
        load.verify(path, digests=digests)
    except CheckpointError:
        return False
    return True
