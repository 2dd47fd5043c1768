"""What was measured of this machine within an hour: a plan and a run that follow each other say the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.hardware.present import cpu_model
from megatrain.model.profile.kept import KeptCounts, key_of

_FOR_S = 3600.0


class Lately:
    """Numbers that were measured lately, kept with the counts of models."""

    def __init__(self, folder: Path | None) -> None:
        """Keep numbers in a folder; None: nowhere, and measure anew."""
        self._kept = None if folder is None else KeptCounts(folder)

    def number(self, measure: Callable[[], float | None], **what: Any) -> float | None:
        """Return a number that was measured under the same name, or measure it now.

        Args:
            measure: Returns it; None: there is none.
            what: Its name: all that it depends on beside this machine, as plain values.
        """
        if self._kept is None:
            return measure()
        key = key_of(b"", measured=what, cpu=cpu_model())
        found = self._kept.load(key, for_s=_FOR_S)
        if found is None:
            found = {"number": measure()}
            self._kept.save(key, found)
        number = found["number"]
        return None if number is None else float(number)
