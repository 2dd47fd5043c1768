"""A fingerprint of the contents of sources: equal names mean equal bytes."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from megatrain.config.sections.data import SourceConfig
from megatrain.data.read.arrow_rows import hub_revision
from megatrain.data.read.dataset_info import entry_of, registry
from megatrain.data.read.files import is_of_hub
from megatrain.errors import DataError, os_errors

_PIECE_BYTES = 1 << 24


def content_of(sources: Sequence[SourceConfig]) -> str | None:
    """Return a name for the bytes of all files of sources and the commits of hub datasets.

    Returns:
        None: The commit of some hub dataset is unknown.

    Raises:
        DataError: A file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        info = registry(source.path)
        path = source.path if source.dataset is None and info is None else entry_of(source).path
        files = list(_files(path))
        if not files:
            revision = hub_revision(path, source.revision) if is_of_hub(path) else None
            if revision is None:
                return None
            digest.update(f"{path}@{revision}\n".encode())
        for file in files if info is None else [info, *files]:
            with os_errors("read", file, DataError):
                digest.update(f"{file.name} {_digest(file)}\n".encode())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _files(path: str) -> Iterator[Path]:
    place = Path(path)
    if place.is_file():
        yield place
    elif place.is_dir():
        yield from sorted(file for file in place.rglob("*") if file.is_file())
    else:
        yield from sorted(Path(file) for file in glob.glob(path, recursive=True) if Path(file).is_file())
