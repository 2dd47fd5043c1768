"""Write safetensors files one tensor at a time, durable and all or nothing.

Source of the layout: the safetensors format description (an 8-byte little-endian header length, a JSON header
that may be padded with spaces, the raw data without holes).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain import files

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HEADER_ALIGNMENT = 4096
"""Tensor data begin at a multiple of this, so that they can be written and read with direct I/O."""

# Names of the safetensors format for the names of torch, which is not imported here.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


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


def write_safetensors(path: Path, tensors: Sequence[TensorSource], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, one tensor in memory at a time; durable and all or nothing, as bytes are.

    Tensors are asked for by decreasing size of their elements, otherwise in the order given: the format has
    no holes, and an odd number of small elements first would leave the rest misaligned.

    Args:
        path: The file, new or old.
        tensors: The tensors; names differ.
        metadata: Strings for the header.

    Raises:
        OutputError: The file cannot be written; what was there is still there.
    """
    ordered = sorted(tensors, key=lambda source: -source.dtype.itemsize)
    header = _safetensors_header(ordered, metadata)
    with files.replacing(path) as descriptor:
        files.write_all(descriptor, memoryview(header), path)
        for source in ordered:
            files.write_all(descriptor, _raw_bytes(source), path)


def _safetensors_header(tensors: Sequence[TensorSource], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for source in tensors:
        assert source.name not in {*entries, "__metadata__"}, f"{source.name} twice in one file"
        count = 1
        for size in source.shape:
            count *= size
        end = begin + count * source.dtype.itemsize
        dtype = _DTYPES[str(source.dtype).removeprefix("torch.")]
        entries[source.name] = {"dtype": dtype, "shape": list(source.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _raw_bytes(source: TensorSource) -> memoryview:
    """Return the bytes of a tensor; no copy of one that is contiguous and on the host."""
    import torch

    tensor = source.get().detach()
    found, announced = (tensor.dtype, tuple(tensor.shape)), (source.dtype, source.shape)
    assert found == announced, f"{source.name} is {found}, announced as {announced}"
    array: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
