"""The folders in which commands keep measurements, counts and prepared data."""

from __future__ import annotations

import os
from pathlib import Path


def measured_file() -> Path:
    """Return the file in which `doctor --bench` keeps its rates, for `plan` and the engine."""
    return cache_folder() / "machine.json"


def counts_folder() -> Path:
    """Return the folder in which counts of models are kept, for `plan` and `train`."""
    return cache_folder() / "counts"


def prepared_folder() -> Path:
    """Return the folder in which prepared data is kept, for `data prepare` and `train`."""
    return cache_folder() / "data"


def cache_folder() -> Path:
    """Return the folder in which measurements and counts are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "megatrain"
