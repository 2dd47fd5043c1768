"""Names a model by what is in its files, without reading all of them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from megatrain.errors import ModelError, os_errors
from megatrain.model.weights.files import checkpoint_files

_PIECES = 64
"""Places of a file that are read, evenly spread: a model that was trained further differs in all of them."""
_PIECE_BYTES = 4096


def fingerprint(directory: Path) -> str:
    """Return a hash of a model's configuration, of the sizes of its files, and of samples of their bytes.

    Raises:
        ModelError: A file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    with os_errors("read", directory, ModelError):
        digest.update((directory / "config.json").read_bytes())
        for file in sorted(checkpoint_files(directory)):
            with file.open("rb") as opened:
                size = opened.seek(0, os.SEEK_END)
                digest.update(f"{file.name} {size}\n".encode())
                for piece in range(_PIECES):
                    opened.seek(piece * max(0, size - _PIECE_BYTES) // (_PIECES - 1))
                    digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()
