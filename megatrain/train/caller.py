"""The caller of a plan or a run, beside its settings: what it keeps, how it measures, and what it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.stream.machine import Measure

Progress = Callable[[str], object]
"""A function that is told in a few words of each slow operation before it begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The folders that a caller keeps between runs, and the functions that it lends them."""

    counts: Path | None = None
    """The folder in which counts of models are kept; None counts each model anew."""
    prepared: Path | None = None
    """The folder in which prepared data is kept; None keeps it only in `data.cache`."""
    measure: Measure | None = None
    """The measurement of the machine, as in `machine_of`."""
    progress: Progress = logging.getLogger(__name__).debug
    """The function that is told of slow operations, and given an empty text as steps begin."""

    def references(self, config: Config) -> Path:
        """Return the folder in which log-probabilities of reference models are kept."""
        return Path(config.data.cache or self.prepared or Path(config.out) / "reference")


NOBODY = Caller()
"""A caller that keeps nothing and shows nothing."""
