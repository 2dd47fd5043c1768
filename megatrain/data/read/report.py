"""The report on every row: read, kept, repaired or dropped, by reason, with the first places of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatrain.config.sizes import counted
from megatrain.data.example import Source
from megatrain.errors import DataError

_NUM_PLACES = 5


@dataclass(kw_only=True, slots=True)
class Tally:
    """The number of rows that share a reason, and the places of the first of them."""

    count: int = 0
    places: list[Source] = field(default_factory=list)
    detail: str = ""
    """The exact fault of the first row."""

    def add(self, place: Source, detail: str = "") -> None:
        """Count a row."""
        self.detail = self.detail or detail
        self.count += 1
        if len(self.places) < _NUM_PLACES:
            self.places.append(place)

    def __str__(self) -> str:
        rows: dict[str, list[str]] = {}
        for place in self.places:
            rows.setdefault(place.file, []).append(str(place.row))
        places = ", ".join(f"{file}:{', '.join(numbers)}" for file, numbers in rows.items())
        return f"{self.count:,} ({places}{', ...' * (self.count > len(self.places))})"


@dataclass(kw_only=True, slots=True)
class SourceReport:
    """The report on the rows of one source."""

    name: str
    format: str = ""
    """The format of the rows, in words."""
    num_rows: int = 0
    """The number of rows read; a row can give several examples, or none."""
    num_kept: int = 0
    """The number of examples kept."""
    num_other_part: int = 0
    """The number of examples that belong to another part."""
    other_part: str = "held out"
    """The name of the other part, in words."""
    dropped: dict[str, Tally] = field(default_factory=dict)
    """The dropped rows, by reason."""
    repaired: dict[str, Tally] = field(default_factory=dict)
    """The repaired rows, by what was done."""
    files: set[str] = field(default_factory=set)
    columns: set[str] = field(default_factory=set)
    """The columns that rows have."""
    read_columns: set[str] = field(default_factory=set)
    turn_keys: set[str] = field(default_factory=set)
    """The keys of turns that only the chat template may read."""

    @property
    def unread_columns(self) -> list[str]:
        """Return the columns that nothing was taken from."""
        return sorted(self.columns - self.read_columns)

    @property
    def num_dropped(self) -> int:
        """Return the number of rows, or examples of them, that were left out."""
        return sum(tally.count for tally in self.dropped.values())

    def drop(self, place: Source, reason: str, detail: str = "") -> None:
        """Count a row that is left out."""
        self.dropped.setdefault(reason, Tally()).add(place, detail)

    def repair(self, place: Source, what: str) -> None:
        """Count a row that is kept, but not as it was."""
        self.repaired.setdefault(what, Tally()).add(place)

    def lines(self) -> list[str]:
        """Return the report's lines: the counts, then each reason."""
        other = f", {self.num_other_part:,} {self.other_part}" if self.num_other_part else ""
        lines = [
            f"{self.name}: {self.format}; {counted(self.num_rows, 'row')} read, "
            f"{counted(self.num_kept, 'example')} kept"
            f"{other}, {self.num_dropped:,} dropped"
        ]
        lines += [f"  dropped: {reason}: {tally}" for reason, tally in self.dropped.items()]
        lines += [f"  repaired: {what}: {tally}" for what, tally in self.repaired.items()]
        if self.unread_columns:
            lines.append(f"  columns that are not read: {', '.join(self.unread_columns)}")
        if self.turn_keys:
            lines.append(f"  keys of turns for the chat template alone: {', '.join(sorted(self.turn_keys))}")
        return lines

    def json(self) -> dict[str, Any]:
        """Return the counts and first places as plain values."""
        return {
            "name": self.name,
            "format": self.format,
            "rows": self.num_rows,
            "kept": self.num_kept,
            "other_part": self.num_other_part,
            "dropped": {reason: _json(tally) for reason, tally in self.dropped.items()},
            "repaired": {what: _json(tally) for what, tally in self.repaired.items()},
            "unread_columns": self.unread_columns,
            "turn_keys": sorted(self.turn_keys),
        }


def _json(tally: Tally) -> dict[str, Any]:
    return {"count": tally.count, "places": [str(place) for place in tally.places]}


@dataclass(kw_only=True, slots=True)
class ReadReport:
    """The report on the rows of all sources, in which examples that are left out later are counted too."""

    stops: bool = False
    """Whether a row that cannot be used ends the run (`data.on_bad_row: stop`)."""
    sources: list[SourceReport] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Return the number of rows read."""
        return sum(source.num_rows for source in self.sources)

    @property
    def num_kept(self) -> int:
        """Return the number of examples kept."""
        return sum(source.num_kept for source in self.sources)

    @property
    def num_dropped(self) -> int:
        """Return the number of rows or examples left out."""
        return sum(source.num_dropped for source in self.sources)

    def drop(self, place: Source, reason: str, *, is_fault: bool = True) -> None:
        """Count an example that was read and turns out to be unusable, or stop.

        Args:
            place: The place of the example.
            reason: The reason for leaving it out.
            is_fault: Whether the data are at fault; False where the settings ask for it.

        Raises:
            DataError: `data.on_bad_row` is `stop`, and the data are at fault.
        """
        if self.stops and is_fault:
            raise DataError(f"{place}: {reason}")
        source = self._source_of(place)
        source.num_kept -= 1
        source.drop(place, reason)

    def repair(self, place: Source, what: str) -> None:
        """Count an example that is kept, but not as it was."""
        self._source_of(place).repair(place, what)

    def _source_of(self, place: Source) -> SourceReport:
        return next(source for source in self.sources if place.file in source.files)

    def lines(self) -> list[str]:
        """Return the report's lines, source by source."""
        return [line for source in self.sources for line in source.lines()]

    def json(self) -> dict[str, Any]:
        """Return the counts and first places as plain values."""
        return {
            "rows": self.num_rows,
            "kept": self.num_kept,
            "dropped": self.num_dropped,
            "sources": [source.json() for source in self.sources],
        }
