"""Where commands keep what they have measured, counted and prepared."""

from __future__ import annotations

import os
from pathlib import Path


def measured_file() -> Path:
    """Return where `doctor --bench` keeps its rates, for `plan` and the engine."""
    return cache_folder() / "machine.json"


def counts_folder() -> Path:
    """Return where counts of models are kept, for `plan` and `train`."""
    return cache_folder() / "counts"


def prepared_folder() -> Path:
    """Return where prepared data is kept, for `data prepare` and `train`."""
    return cache_folder() / "data"


def cache_folder() -> Path:
    """Return where what was measured and counted is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "megatrain"
