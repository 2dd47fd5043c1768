"""Find the checkpoints of a run, prove one whole, and read its tensors without running any code of it.

What must stay true: nothing is taken from a checkpoint before the digests of all its files have been
compared, and nothing damaged is passed over without a word. Reading changes no file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain import files
from megatrain.checkpoint import format
from megatrain.checkpoint.comparison import check_size, compare
from megatrain.errors import NO_TENSOR, CheckpointError, first_line, os_errors, os_sentence

if TYPE_CHECKING:
    from torch import Tensor


_DAMAGE = (None, errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""The errors with which reading a damaged or missing file ends; another error says nothing about the file."""


class DamagedError(CheckpointError):
    """A checkpoint that is not what its manifest says; `reason` is the clause that names the file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"checkpoint {path} is damaged: {reason}; restore it from a copy or resume from another"
        )
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
    path: Path, *, digests: bool = True, passed: Callable[[int], None] = lambda num_bytes: None
) -> format.Manifest:
    """Compare every file of a checkpoint with the manifest, and return the manifest.

    Args:
        path: The checkpoint directory, under its own name or any name of the user's.
        digests: Whether to read the files; False compares names and sizes only.
        passed: Called with the number of bytes that were found right, again and again.

    Raises:
        DamagedError: A file is missing, too many, of another size or of other bytes; the message names it,
            and the chunk of it.
        CheckpointError: There is no such directory, a later version of megatrain wrote it, or the system does
            not let it be read.
    """
    try:
        if not _is_directory(path):
            raise CheckpointError(
                f"there is no checkpoint directory {path}; check the path, or resume from another"
            )
        manifest = _verify(path)
        if digests:
            compare(path, manifest, passed)
        return manifest
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
    root: Path, *, warn: Callable[[str], None], digests: bool = True
) -> tuple[Path, format.Manifest] | None:
    """Return the newest checkpoint that is whole, with its manifest; None if there is no checkpoint at all.

    Args:
        root: The directory of the run's checkpoints.
        warn: Called with one sentence for each damaged checkpoint that is passed over.
        digests: A claim that digests are compared too, as in `verify`.

    Raises:
        CheckpointError: There are checkpoints, and none is whole; or the newest whole one is of a later
            version, and going on from an older one would lose its steps.
    """
    paths = find(root)
    reasons = []
    for index, path in enumerate(paths):
        try:
            return path, verify(path, digests=digests)
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


class TensorFile(Mapping[str, "Tensor"]):
    """The tensors of one safetensors file, each read when it is asked for and mapped rather than copied.

    A tensor stays valid after `close`; writing into one does not change the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _reading(path):
            self._file = files.open_safetensors(path)
            self._names = tuple(self._file.keys())
            self.metadata: dict[str, str] = self._file.metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor, on the CPU."""
        if name not in self._names:
            raise CheckpointError(
                f"{self._path} has no tensor {name}; resume from a checkpoint of this model"
            )
        with _reading(self._path):
            tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        """Say whether there is a tensor of this name."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._file.__exit__(None, None, None)


def read_safetensors(path: Path) -> TensorFile:
    """Open a safetensors file for reading; nothing but the header is read yet.

    Raises:
        CheckpointError: The file is missing or is not a whole safetensors file.
    """
    return TensorFile(path)


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


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        with os_errors("read the tensors in", path, CheckpointError):
            yield
    except (SafetensorError, *NO_TENSOR) as error:
        raise CheckpointError(
            f"megatrain cannot read the tensors in {path}: {first_line(error)}; restore it, or resume from "
            "another"
        ) from error
