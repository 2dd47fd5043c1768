"""Scratch memory in a nameless file on a drive: the kernel writes its pages out where RAM is short."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from megatrain.store.drives import system as calls
from megatrain.store.drives.places import drive_errors


class FileArena:
    """`nbytes` of zeroed memory that are pages of a file; gone when the last view is."""

    def __init__(self, nbytes: int, directory: Path) -> None:
        """Take the room on the drive, then map it.

        Raises:
            CapacityError: The drive has no room.
            OutputError: The file cannot be made.
        """
        with (
            drive_errors(f"take {nbytes:,} bytes of scratch room in", directory),
            tempfile.TemporaryFile(dir=directory) as file,
        ):
            calls.system.fallocate(file.fileno(), max(nbytes, 1))
            self._map = mmap.mmap(file.fileno(), max(nbytes, 1))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]

    def view(self, dtype: torch.dtype, byte_offset: int, numel: int) -> Tensor:
        """View `numel` elements of `dtype` from `byte_offset` as a (numel,) tensor."""
        return self._bytes[byte_offset : byte_offset + numel * dtype.itemsize].view(dtype)
