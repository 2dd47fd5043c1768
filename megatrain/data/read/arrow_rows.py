"""Readers of Parquet and Arrow files, saved datasets and hub datasets, through `datasets`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from megatrain.data.row import Row
from megatrain.errors import DataError, MegatrainError
from megatrain.hub import asking_hub

_log = logging.getLogger(__name__)

_BATCH = 256
_BATCH_BYTES = 1 << 25
"""The bytes of rows that are turned into Python's values at a time."""
_HUB_WAIT_S = 10.0


def read_columnar(path: str, *, builder: str) -> Iterator[Row]:
    """Read a file; `builder` is `parquet` or `arrow`."""
    import datasets
    from pyarrow import parquet

    def load() -> Any:
        if builder == "parquet" and parquet.read_metadata(path).num_rows == 0:
            raise DataError(f"{path} has no rows; remove it from data.path")
        return datasets.load_dataset(builder, data_files=[path], split="train", streaming=True)

    yield from _rows(load, f"{path} is not readable as {builder}")


def read_saved(path: str, *, split: str | None = None) -> Iterator[Row]:
    """Read a directory written by `save_to_disk`."""
    import datasets

    def load() -> Any:
        return choose_split(datasets.load_from_disk(path), split, path)

    yield from _rows(load, f"{path} is not readable as a saved dataset")


def read_hub(
    path: str,
    *,
    split: str | None = None,
    subset: str | None = None,
    folder: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
) -> Iterator[Row]:
    """Read a dataset of the Hugging Face hub, downloaded first or streamed."""
    import datasets

    def load() -> Any:
        commit = hub_revision(path, revision) or revision
        with asking_hub(path, "it", DataError):
            loaded = datasets.load_dataset(
                path, name=subset, data_dir=folder, streaming=streaming, revision=commit
            )
        return choose_split(loaded, split, path)

    yield from _rows(load, f"{path} cannot be read from the Hugging Face hub", shows_progress=True)


@lru_cache
def hub_revision(path: str, revision: str | None = None) -> str | None:
    """Return the commit at which this process reads a hub dataset; None if the hub does not say.

    Args:
        path: The dataset's id.
        revision: The commit, branch or tag; None means the newest commit.
    """
    from huggingface_hub import HfApi

    try:
        with asking_hub(path, "it", DataError):
            return HfApi().dataset_info(path, revision=revision, timeout=_HUB_WAIT_S).sha
    except DataError as error:  # offline, private or renamed: whoever reads the rows raises the error
        _log.debug("%s: the hub does not say at which commit it is (%s)", path, error)
        return None


def choose_split(loaded: Any, split: str | None, path: str) -> Any:
    """Return the named split of a dataset, or else `train` or the only one.

    Raises:
        DataError: The dataset has no such split, or has several of which none is `train`.
    """
    if not isinstance(loaded, dict):
        if split is not None and str(loaded.split or split) != split:
            raise DataError(f"{path} holds the split {loaded.split}, not {split}; check data.split")
        return loaded
    names = ", ".join(map(str, loaded))
    wanted = split or (
        "train" if "train" in loaded else str(next(iter(loaded))) if len(loaded) == 1 else None
    )
    if wanted is None:
        raise DataError(f"{path} has the splits {names}; choose one with data.split")
    if wanted not in loaded:
        raise DataError(f"{path} has no split {wanted}; it has {names}; check data.split")
    return loaded[wanted]


def _rows(load: Any, problem: str, *, shows_progress: bool = False) -> Iterator[Row]:
    try:
        with _quiet(shows_progress):
            dataset = load()
            # As Arrow tables, images and sounds are not decoded, and no row is turned into tensors.
            dataset = dataset.with_format("arrow")
            batches = iter(dataset.iter(batch_size=_BATCH))
        number = 0
        while True:
            with _quiet(shows_progress):
                table = next(batches, None)
            if table is None:
                return
            # as Python's values a row of tokens takes ten times its bytes, so large rows are few at a time
            size = max(1, _BATCH_BYTES * len(table) // max(1, table.nbytes))
            for start in range(0, len(table), size):
                for value in table.slice(start, size).to_pylist():
                    number += 1
                    yield Row(number, {name: _without_none(cell) for name, cell in value.items()})
    except MegatrainError:
        raise
    except Exception as error:  # pyarrow, fsspec, the hub's client and builders each have errors of their own
        raise DataError(f"{problem} ({' '.join(str(error).split())[:300]})") from error


def _without_none(value: Any) -> Any:
    """Drop the keys that a column has only because another row has them."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value


@contextmanager
def _quiet(shows_progress: bool) -> Iterator[None]:
    """Silence progress bars and log lines; errors are raised here, with the file's name."""
    import datasets

    logger = logging.getLogger("datasets")
    level, shown = logger.level, datasets.is_progress_bar_enabled()
    if not shows_progress:
        datasets.disable_progress_bars()
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            datasets.enable_progress_bars()
