"""What all tests of trainers share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _frozen() -> Iterator[None]:
    """Keep what torch, transformers and TRL have imported from the collections that each `train` makes."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
