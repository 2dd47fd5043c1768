"""Settings of the tests of trainers."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _what_trainers_have_imported_stays() -> None:
    """Let no collection look at it again: accelerate collects at both ends of each training."""
    gc.collect()
    gc.freeze()
