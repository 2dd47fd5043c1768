"""A file of JSON rows to which a run appends; each is handed to the system at once, so a killed run keeps it.

A last line without its end was torn by a crash, and is cut off by the next process that opens the file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatrain import files
from megatrain.errors import OutputError, os_errors, warn_once

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

    def append(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append one row, and return it. Numbers that JSON has no form for (nan, inf) become null.

        Raises:
            OutputError: The row cannot be written; no part of it is left, if the system allows that.
        """
        row = {name: _finite(value) for name, value in values.items()}
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with os_errors("write", self._path):
            status = os.fstat(self._descriptor)
        if not status.st_nlink:
            self._make_again()
            status = os.fstat(self._descriptor)
        size = status.st_size
        try:
            files.write_all(self._descriptor, memoryview(line), self._path)
        except OutputError:
            with contextlib.suppress(OSError):
                files.system.truncate(self._descriptor, size)
            raise
        return row

    def _make_again(self) -> None:
        """Begin a file anew that was removed under this one, unless its directory is another one now."""
        try:
            is_there = os.path.samestat(os.stat(self._path.parent), self._folder)
        except OSError:
            is_there = False
        if not is_there:
            warn_once(_log, f"{self._path} was removed with its directory; its rows are kept nowhere")
            return
        _log.warning("%s was removed; it is begun anew, without the rows that it had", self._path)
        descriptor = files.open_to_append(self._path)
        with contextlib.suppress(OSError):  # nobody will read what was written to it
            files.system.close(self._descriptor)
        self._descriptor = descriptor

    def close(self) -> None:
        """Close the file.

        Raises:
            OutputError: The system could not keep what was written.
        """
        with os_errors("write", self._path):
            files.system.close(self._descriptor)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with contextlib.suppress(OutputError) if error is not None else contextlib.nullcontext():
            self.close()  # the first error is the one to report


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
