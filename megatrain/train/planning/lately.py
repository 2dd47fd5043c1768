"""Measurements of this machine within an hour, so that a plan and the run after it use the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatrain.hardware.this_machine import cpu_model
from megatrain.model.profile.anatomy_cache import KeptCounts, key_of

_FOR_S = 3600.0

_NEARLY = 0.9
"""The part of the memory free now that must have been free in the earlier measurement for it to be reused."""


class Lately:
    """Recent measurements, kept with the counts of models."""

    def __init__(self, folder: Path | None) -> None:
        """Keep numbers in a folder; None keeps none, and measures anew."""
        self._kept = None if folder is None else KeptCounts(folder)

    def number(self, measure: Callable[[], float | None], **what: Any) -> float | None:
        """Return a recent number that was measured under the same name, or measure it now.

        Args:
            measure: The function that returns the number, or None if there is none.
            what: The name of the number: all that it depends on beside this machine, as plain values.
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
        """Return the host memory measured earlier, if it is still free and is not much less than now.

        Programs take and return memory all the time, and the size of micro-batches may turn on that.
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
