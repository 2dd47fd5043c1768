"""What was measured of this machine within an hour: a plan and a run that follow each other say the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatrain.hardware.present import cpu_model
from megatrain.model.profile.kept import KeptCounts, key_of

_FOR_S = 3600.0

_NEARLY = 0.9
"""Part of the memory that is free now that must have been free lately for that to be taken."""


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
        key = _key(what)
        found = self._kept.load(key, for_s=_FOR_S)
        if found is None:
            found = {"number": measure()}
            self._kept.save(key, found)
        number = found["number"]
        return None if number is None else float(number)

    def free_bytes(self, now: int) -> int:
        """Return the host memory that was free lately, if it still is and is not much less than what is now.

        Programs take memory and give it back all the time, and the size of micro-batches may turn on that.
        """
        if self._kept is None:
            return now
        key = _key({"what": "free host memory"})
        found = self._kept.load(key, for_s=_FOR_S)
        if found is not None and _NEARLY * now <= found["number"] <= now:
            return int(found["number"])
        self._kept.save(key, {"number": now})
        return now


def _key(what: Mapping[str, Any]) -> str:
    return key_of(b"", measured=what, cpu=cpu_model())
