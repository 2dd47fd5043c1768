"""Opens safetensors files and reads single tensors of them; nothing is ever unpickled."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from megatrain.errors import NO_TENSOR, ModelError, first_line, os_errors
from megatrain.files import open_safetensors
from megatrain.hub import refuse_link_out
from megatrain.model.weights.convert import Source

_MOST_JSON_BYTES = 256 * 2**20


@contextlib.contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
        ModelError: The file cannot be read, or is not whole.
    """
    try:
        with os_errors("read", file, ModelError):
            handle = open_safetensors(file)
    except (SafetensorError, ValueError) as error:
        raise ModelError(
            f"{file} is truncated or no safetensors file; fetch it again: {first_line(error)}"
        ) from error
    with handle:
        yield handle


def read_json(file: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        ModelError: The file is not there, is no JSON, is a link out of its directory, or is too large.
    """
    try:
        refuse_link_out(file)
        if file.stat().st_size > _MOST_JSON_BYTES:
            raise ModelError(f"{file} is larger than {_MOST_JSON_BYTES >> 20} MiB, and no JSON of a model is")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {first_line(error)}") from error


class NonFiniteError(ModelError):
    """Weights have values from which nothing can be trained."""


def read_weights(handles: Mapping[Path, Any], source: Source) -> torch.Tensor:
    """Return a tensor of an open file whose values are all finite, if it is of floats; a view of it.

    Raises:
        ModelError: The tensor cannot be read, or has values that are not finite.
    """
    tensor = read_tensor(handles, source)
    require_finite(tensor, source.file, source.key)
    return tensor


def require_finite(tensor: torch.Tensor, file: Path, key: str) -> None:
    """Refuse a tensor of floats that are not all finite.

    Raises:
        NonFiniteError: The tensor has such values; the error names it and counts them.
    """
    # the sum is finite only if all values are, and takes a twentieth of the time of a look at each
    if not tensor.is_floating_point() or tensor.sum().isfinite():
        return
    num_bad = int((~tensor.isfinite()).sum())
    if num_bad:
        raise NonFiniteError(
            f"{file}: {key} has {num_bad:,} of {tensor.numel():,} values that are not finite (NaN or inf), "
            "from which nothing can be trained; fetch or export the model again, or go on from an earlier "
            "checkpoint"
        )


def read_tensor(handles: Mapping[Path, Any], source: Source) -> torch.Tensor:
    """Return a tensor of an open file, a view of it, or one that is made of such.

    Raises:
        ModelError: The tensor cannot be read.
    """
    if source.making is not None:
        parts = {name: read_tensor(handles, part) for name, part in source.making.parts.items()}
        return source.making.make(parts)
    try:
        with os_errors("read", source.file, ModelError):
            tensor: torch.Tensor = handles[source.file].get_tensor(source.key)
    except (SafetensorError, *NO_TENSOR) as error:
        raise ModelError(f"{source.file}: {source.key} cannot be read: {first_line(error)}") from error
    return tensor
