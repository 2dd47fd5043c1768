"""The layout of a safetensors file: a header, padded with spaces, and the raw tensors without holes.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The names that torch, which is not imported here, has for types, by those that safetensors has."""
_ITEM_BYTES = {
    dtype: int(bits[0]) // 8 if (bits := re.search(r"[0-9]+", name)) else 1 for name, dtype in DTYPES.items()
}
"""The bytes of an element of each type."""
_NAMES = {f"torch.{dtype}": name for name, dtype in DTYPES.items()}


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str], *, alignment: int
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file, and the position of each tensor in the file.

    Args:
        tensors: The names, types and shapes in the order of the file; names differ.
        metadata: The strings for the header.
        alignment: The number of bytes of which the header takes a multiple.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins = {}
    end = 0
    for name, dtype, shape in tensors:
        assert name not in entries, f"{name} twice in one file"
        assert name != "__metadata__", "a tensor has the name of the file's metadata"
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[str(dtype)], "shape": list(shape), "data_offsets": [begin, end]}
        begins[name] = begin
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


class TensorPlace(NamedTuple):
    """A tensor of a file, as its header describes it."""

    dtype: str
    """Its type, by the name that torch has for it."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    begin: int
    """The byte of the file at which it begins."""
    num_bytes: int
    """Its size."""


MOST_HEADER_BYTES = 100_000_000
"""The format allows no longer header."""


def read_places(read: Callable[[int, int], bytes], num_bytes: int) -> tuple[dict[str, TensorPlace], bytes]:
    """Return the tensors of a file by name, and the bytes of its header.

    Args:
        read: The function that returns the bytes of the file from one place to another.
        num_bytes: The size of the file.

    Raises:
        ValueError: The file has no sound header.
    """
    length = int.from_bytes(read(0, min(8, num_bytes)), "little")
    if num_bytes < 8 or length > min(num_bytes - 8, MOST_HEADER_BYTES):
        raise ValueError("it is no whole safetensors file")
    text = read(8, 8 + length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        places = {name: _place(entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its header is none of a safetensors file") from error
    for name, place in places.items():
        if place.begin + place.num_bytes > num_bytes:
            raise ValueError(f"{name} lies behind its end")
    return places, length.to_bytes(8, "little") + text


def _place(entry: Mapping[str, Any], start: int) -> TensorPlace:
    dtype, (begin, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (begin, end, *shape)):
        raise ValueError
    if end - begin != prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError
    return TensorPlace(dtype, shape, start + begin, end - begin)


def positions(file: Path) -> dict[str, int]:
    """Return the position of each tensor in a safetensors file, which was opened before and is sound."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(length))
    entries.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items()}
