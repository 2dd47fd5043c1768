"""Files of these tests, written hundreds of times a second, lie in memory where that is possible."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = "/dev/shm"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory of a test, in memory if there is a file system for that."""
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """Log nothing: what is read has characters that no message between processes can hold."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
