"""Writes safetensors files whose contents are known ahead and whose tensors arrive in any order."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatrain import files
from megatrain.errors import os_errors
from megatrain.layout.tensor_file import header_of

_TEMPORARY_SUFFIX = ".partial"

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(kw_only=True, slots=True)
class Shard:
    """A file of the export, by the tensors in it."""

    tensors: Specs = field(default_factory=dict)
    num_bytes: int = 0
    name: str = ""

    def add(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Give a tensor a place in the file."""
        self.tensors[key] = (dtype, shape)
        self.num_bytes += num_bytes(dtype, shape)

    def layout(self) -> tuple[bytes, dict[str, int]]:
        """Return the header, with its length ahead, and the position of each tensor in the file."""
        # Wide elements first, so that each tensor is aligned to its own elements.
        ordered = sorted(self.tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
        return header_of(((key, *spec) for key, spec in ordered), {"format": "pt"}, alignment=8)


class ShardWriter:
    """Writes the tensors of one shard in any order; the file gets its name when the last one is written."""

    def __init__(self, file: Path, shard: Shard, written: list[Path]) -> None:
        self._file = file
        self._temporary = file.with_name(file.name + _TEMPORARY_SUFFIX)
        self._num_left = len(shard.tensors)
        header, self._positions = shard.layout()
        written += [self._temporary, self._file]
        with os_errors("write", self._file):
            if self._temporary.exists():  # left by an export that was killed
                files.system.unlink(self._temporary)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._descriptor: int | None = files.system.open(self._temporary, flags)
        self._put(0, header)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the export has failed already
                files.system.close(self._descriptor)
            self._descriptor = None

    def write(self, key: str, value: torch.Tensor) -> None:
        """Write a tensor in its place; the last one completes the file on the disk.

        Raises:
            OutputError: The file cannot be written.
        """
        data: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._put(self._positions[key], data)
        self._num_left -= 1
        if self._num_left == 0:
            assert self._descriptor is not None
            with os_errors("write", self._file):
                files.system.fsync(self._descriptor)
                descriptor, self._descriptor = self._descriptor, None
                files.system.close(descriptor)
            files.rename(self._temporary, self._file)
            files.fsync_directory(self._file.parent)

    def _put(self, position: int, data: bytes) -> None:
        assert self._descriptor is not None
        with os_errors("write", self._file):
            os.lseek(self._descriptor, position, os.SEEK_SET)
        files.write_all(self._descriptor, memoryview(data), self._file)


def num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize
