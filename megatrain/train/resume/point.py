"""The point from which a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """A checkpoint, a newer commit on drives, or neither: then the run is new."""

    checkpoint: Path | None = None
    saved: Mapping[str, Any] | None = None
    """The record in the checkpoint's manifest."""
    committed: Mapping[str, Any] | None = None
    """The record of the commit, which is newer than the checkpoint."""

    @property
    def record(self) -> Mapping[str, Any] | None:
        """The record of the state with which the run goes on; None for a new run."""
        return self.saved if self.committed is None else self.committed


NEW_RUN = ResumePoint()


def as_values(point: ResumePoint) -> dict[str, Any]:
    """Return a point as plain values, for other ranks."""
    return asdict(point) | {"checkpoint": None if point.checkpoint is None else str(point.checkpoint)}


def point_from_values(values: Mapping[str, Any]) -> ResumePoint:
    """Undo `as_values`."""
    place = values["checkpoint"]
    return ResumePoint(**{**values, "checkpoint": None if place is None else Path(place)})
