"""What happened in a run, one row per event in `events.jsonl`: its history, of every process that it had.

Rows are only ever appended, a resume cuts nothing but a torn end: after a crash the steps behind the last
checkpoint are taken again, and the history says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatrain.config.sections.log import Event
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.json_lines import JsonLines, read_rows


class EventLog(JsonLines):
    """Appends events to `events.jsonl`, and tells those who listen."""

    def __init__(
        self,
        path: Path,
        *,
        listen: Callable[[Mapping[str, Any]], object] = lambda row: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the file.

        Args:
            path: Of the file; a last row that a crash tore is cut off.
            listen: Is given every row once it is written.
            clock: Seconds since 1970, for tests.

        Raises:
            OutputError: The file cannot be written.
        """
        super().__init__(path)
        self._listen = listen
        self._clock = clock

    def write(self, event: Event, step: int, **values: Any) -> None:
        """Append an event.

        Args:
            event: What happened.
            step: Steps done when it did.
            values: What else is known of it: plain values.

        Raises:
            OutputError: It cannot be written.
        """
        row = {"event": event, "time": round(self._clock(), 3), "step": step, **values}
        self._listen(self.append(row))


def record_ranks(
    directory: RunDirectory, codes: Mapping[int, int], sentences: Mapping[int, str], num_left: int
) -> None:
    """Record how ranks of a run have ended, now that none lives; a run that never began has no record.

    Args:
        directory: Of the run.
        codes: Exit codes, by rank.
        sentences: What they said, by rank.
        num_left: How many go on.

    Raises:
        OutputError: It cannot be written.
    """
    if directory.is_run:
        step = max((int(row["step"]) for row in read_rows(directory.events) if "step" in row), default=0)
        with EventLog(directory.events) as events:
            events.write("ranks", step, codes=dict(codes), sentences=dict(sentences), left=num_left)
