"""A file of JSON rows to which a run appends; each is handed to the system at once, so a killed run keeps it.

A last line without its end was torn by a crash, and is cut off by the next process that opens the file. A row
that cannot be written costs that row, and never the run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatrain import files
from megatrain.config.sizes import counted
from megatrain.errors import MegatrainError, os_errors

_log = logging.getLogger(__name__)

_Self = TypeVar("_Self", bound="JsonLines")


def cut_torn_end(descriptor: int, path: Path) -> bool:
    """Cut off a last line without its end; return True, since the file is still the same."""
    with os_errors("read", path), os.fdopen(os.dup(descriptor), "rb") as file:
        content = file.read()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with os_errors("write", path):
            files.system.truncate(descriptor, end)
    return True


class JsonLines:
    """Appends rows to a private file; use as a context manager."""

    def __init__(self, path: Path, cut: Callable[[int, Path], bool] = cut_torn_end) -> None:
        """Open the file, and cut what does not belong there.

        Args:
            path: The path of the file, which is made if missing, and refused if it is a link.
            cut: The function of the open file and its path that returns False if it replaced the file.

        Raises:
            OutputError: The file cannot be written.
        """
        self._path = path
        descriptor = files.open_to_append(path)
        self._folder = os.stat(path.parent)
        try:
            if not cut(descriptor, path):
                files.system.close(descriptor)
                descriptor = files.open_to_append(path)
        except BaseException:
            with contextlib.suppress(OSError):
                files.system.close(descriptor)
            raise
        self._descriptor = descriptor
        self._torn_at: int | None = None
        """The size of the file before a row of which a part is left; None: all rows are whole."""
        self.num_missed = 0
        """The number of rows that could not be written."""

    def append(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append one row, and return it. Numbers that JSON has no form for (nan, inf) become null.

        A row that cannot be written is left out, and no part of it stays. The first one is a warning, and the
        number of all is said when the file is closed.
        """
        row = {name: _finite(value) for name, value in values.items()}
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            self._follow()
            self._write(line)
        except MegatrainError as error:
            self.num_missed += 1
            if self.num_missed == 1:
                _log.warning("%s. The run goes on without the rows that cannot be written", error)
        return row

    def _write(self, line: bytes) -> None:
        with os_errors("write", self._path):
            if self._torn_at is not None:
                files.system.truncate(self._descriptor, self._torn_at)
            self._torn_at = os.fstat(self._descriptor).st_size
        try:
            files.write_all(self._descriptor, memoryview(line), self._path)
        except MegatrainError:
            with contextlib.suppress(OSError):
                files.system.truncate(self._descriptor, self._torn_at)
                self._torn_at = None
            raise
        self._torn_at = None

    def _is_in_place(self) -> bool:
        """Return whether the directory is the one in which the file was opened."""
        try:
            return os.path.samestat(os.stat(self._path.parent), self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _follow(self) -> None:
        """Open the file anew where it was removed or replaced; one in a moved directory stays open."""
        with os_errors("write", self._path):
            mine = os.fstat(self._descriptor)
            if not self._is_in_place():
                if not mine.st_nlink:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                return
            try:
                found = os.lstat(self._path)
            except FileNotFoundError:
                pass
            else:
                if os.path.samestat(mine, found):
                    return
            descriptor = files.open_to_append(self._path)
            before, self._descriptor, self._torn_at = self._descriptor, descriptor, None
            _log.warning("%s was removed or replaced: its rows go on in a file of that name", self._path)
            files.system.close(before)

    def close(self) -> None:
        """Close the file, and say how many rows it lacks."""
        try:
            with os_errors("write", self._path):
                files.system.close(self._descriptor)
        except MegatrainError as error:
            _log.warning("%s. Its last rows may be missing", error)
        if self.num_missed:
            _log.warning("%s of %s could not be written", counted(self.num_missed, "row"), self._path)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the intact rows of a file, as far as they are there; damaged ones are skipped.

    A run may be writing to it.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line, parse_constant=lambda _: None)  # `append` writes nan and inf so
            if isinstance(row, dict):
                yield {name: _finite(value) for name, value in row.items()}  # 1e999 is read as infinity


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
