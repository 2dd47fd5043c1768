"""Write safetensors files one tensor at a time, durable and all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain import files
from megatrain.checkpoint.contents import Group, LargeFile, Place
from megatrain.layout.tensor_file import header_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMAT = {"format": "pt"}
"""The metadata of every file."""
HEADER_ALIGNMENT = 4096
"""Tensor data begin at a multiple of this, so that they can be written and read with direct I/O."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """One tensor of a file to be: its header entry now, its values when it is their turn."""

    name: str
    """Name in the file."""
    dtype: torch.dtype
    """Type of the elements."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    get: Callable[[], Tensor]
    """Return the tensor, of this dtype and shape, on any device; called once, and the result is let go of."""


def write_safetensors(path: Path, tensors: Sequence[TensorSource]) -> None:
    """Write a safetensors file, one tensor in memory at a time; durable and all or nothing, as bytes are.

    Tensors are asked for by decreasing size of their elements, otherwise in the order given: the format has
    no holes, and an odd number of small elements first would leave the rest misaligned.

    Args:
        path: The file, new or old.
        tensors: The tensors; names differ.

    Raises:
        OutputError: The file cannot be written; what was there is still there.
    """
    ordered = sorted(tensors, key=lambda source: -source.dtype.itemsize)
    entries = [(source.name, source.dtype, source.shape) for source in ordered]
    header, _ = header_of(entries, FORMAT, alignment=HEADER_ALIGNMENT)
    with files.replacing(path) as descriptor:
        files.write_all(descriptor, memoryview(header), path)
        for source in ordered:
            files.write_all(descriptor, _raw_bytes(source), path)


def planned_file(
    name: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], groups: Mapping[str, Group]
) -> LargeFile:
    """Plan a file that `write_safetensors` writes to the same bytes.

    Args:
        name: The name of the file.
        tensors: Type and shape of each tensor by its name, in the order in which that would be given them.
        groups: What each tensor is read with, by its name.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
    header, begins = header_of(((key, *spec) for key, spec in ordered), FORMAT, alignment=HEADER_ALIGNMENT)
    places = [
        Place(key=key, begin=begins[key], num_bytes=dtype.itemsize * prod(shape), group=groups[key])
        for key, (dtype, shape) in ordered
    ]
    return LargeFile(name, header, places)


def _raw_bytes(source: TensorSource) -> memoryview:
    """Return the bytes of a tensor; no copy of one that is contiguous and on the host."""
    import torch

    tensor = source.get().detach()
    found, announced = (tensor.dtype, tuple(tensor.shape)), (source.dtype, source.shape)
    assert found == announced, f"{source.name} is {found}, announced as {announced}"
    array: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
