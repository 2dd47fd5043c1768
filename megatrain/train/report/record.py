"""The recording of a run from its first step to its end: events, their listeners, and the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from megatrain.errors import MegatrainError, RankError
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.events import EventLog
from megatrain.train.report.alerts import Alerts
from megatrain.train.report.page import leave_report
from megatrain.train.run import Run

_INTERRUPTED = 130


@contextmanager
def recorded(run: Run, directory: RunDirectory) -> Iterator[None]:
    """Write the events of the run inside, its end included, and then the report; the first rank does.

    Raises:
        OutputError: The file of events cannot be opened. What cannot be written to it is a warning.
    """
    if run.ranks.rank > 0:
        yield
        return
    log = run.config.log
    try:
        with (
            Alerts(log.webhook, log.webhook_on, run=directory.path.name) as alerts,
            EventLog(directory.events, listen=alerts.tell) as events,
        ):
            run.events = events
            # the watching thread may have to end this process
            run.ranks.watch.last_words = partial(_failed, run, RankError.exit_code)
            try:
                run.tell("resume" if run.step else "start", steps=run.num_steps, **_of_ranks(run))
                yield
                run.tell("end", steps=run.num_steps, **_waits(run))
            except (Exception, KeyboardInterrupt) as error:
                _failed(run, _exit_code(error), _text(error))
                raise
            finally:
                run.events = run.ranks.watch.last_words = None
    finally:
        if log.report:
            leave_report(directory)


def _failed(run: Run, exit_code: int, text: str) -> None:
    run.tell("error", text=text, exit_code=exit_code)


def _of_ranks(run: Run) -> dict[str, int]:
    if run.ranks.size == 1:
        return {}
    return {"ranks": run.ranks.size, "nodes": run.ranks.num_nodes, "shards": run.config.parallel.shards or 1}


def _waits(run: Run) -> dict[str, list[float]]:
    found = run.ranks.watch.waited_s()
    return {"waited_s": found} if found else {}


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, MegatrainError) else f"{type(error).__name__}: {error}"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, MegatrainError):
        return error.exit_code
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
