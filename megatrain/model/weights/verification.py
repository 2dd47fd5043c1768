"""Look at all that a model directory says of itself: headers, sizes, the index, and that values are finite.

A model directory has no digests, so a value that has changed to another finite one is not seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain.hardware.readers import in_order, num_readers
from megatrain.model.weights.files import read_sources
from megatrain.model.weights.reading import open_weights, read_json, read_tensor, require_finite

_PIECE_NUMEL = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """What was found sound."""

    num_files: int
    """Files of weights."""
    num_tensors: int
    """Tensors in them."""
    num_bytes: int
    """Bytes of these."""


def verify_model(
    directory: Path, files: list[Path], passed: Callable[[int], None] = lambda num_bytes: None
) -> ModelFiles:
    """Read all weights of a model directory.

    Args:
        directory: The directory.
        files: Its files of weights, as `checkpoint_files` lists them, or that of adapters.
        passed: Called with the number of bytes that were found sound, again and again.

    Raises:
        ModelError: A file is missing, is cut or cannot be read, or the index does not agree with the files.
        NonFiniteError: A tensor has values that are not finite; the error names it.
    """
    if (directory / "config.json").exists():
        read_json(directory / "config.json")
    sources = read_sources(directory, files, None)
    with ExitStack() as stack:
        handles = {file: stack.enter_context(open_weights(file)) for file in files}

        def check(key: str) -> int:
            tensor = read_tensor(handles, sources[key])
            for piece in tensor.reshape(-1).split(_PIECE_NUMEL) if tensor.itemsize == 1 else (tensor,):
                # torch adds up no floats of 8 bits
                is_small = piece.is_floating_point() and piece.itemsize == 1
                require_finite(piece.float() if is_small else piece, sources[key].file, key)
            return tensor.nbytes

        total = 0
        for num_bytes in in_order((partial(check, key) for key in sources), num_readers()):
            passed(num_bytes)
            total += num_bytes
    return ModelFiles(num_files=len(files), num_tensors=len(sources), num_bytes=total)
