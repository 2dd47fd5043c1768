"""The history of a run, one row per event in `events.jsonl`, over all of its processes.

Rows are only ever appended, and a resume cuts nothing but a torn end. After a crash the steps behind the last
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
    """Appends events to `events.jsonl`, and passes them to a listener."""

    def __init__(
        self,
        path: Path,
        *,
        listen: Callable[[Mapping[str, Any]], object] = lambda row: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the file.

        Args:
            path: The path of the file; a last row that a crash tore is cut off.
            listen: The function that is given every row, also one that cannot be written.
            clock: The clock in seconds since 1970, for tests.

        Raises:
            OutputError: The file cannot be written.
        """
        super().__init__(path)
        self._listen = listen
        self._clock = clock

    def write(self, event: Event, step: int, **values: Any) -> None:
        """Append an event.

        Args:
            event: The event that happened.
            step: The number of steps done by then.
            values: The further facts about it, as plain values.
        """
        row = {"event": event, "time": round(self._clock(), 3), "step": step, **values}
        self._listen(self.append(row))


def record_ranks(
    directory: RunDirectory, codes: Mapping[int, int], sentences: Mapping[int, str], num_left: int
) -> None:
    """Record how ranks of a run have ended, now that none lives; a run that never began has no record.

    Args:
        directory: The directory of the run.
        codes: The exit codes by rank.
        sentences: The last sentences by rank.
        num_left: The number of ranks that go on.

    Raises:
        OutputError: The file cannot be opened.
    """
    if directory.is_run:
        step = max((int(row["step"]) for row in read_rows(directory.events) if "step" in row), default=0)
        with EventLog(directory.events) as events:
            events.write("ranks", step, codes=dict(codes), sentences=dict(sentences), left=num_left)
