"""The endings of a run before its last step: by a signal, a failed callback, or an early stop."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megatrain.distributed.alone import ALONE, Alone
from megatrain.distributed.signals import stop_signals
from megatrain.errors import CallbackError
from megatrain.train.run import Run

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

EXIT_STOPPED = 75
"""EX_TEMPFAIL: a signal stopped the run after it was saved; the same command resumes it."""


def refuse_failed_callback(run: Run, saved: Path | None) -> None:
    """End a run after a callback has raised; `saved` is the checkpoint of its state, None if there is none.

    Raises:
        CallbackError: A callback has raised.
        RankError: It has, on ranks that are not the first.
    """
    failed = run.callbacks.failure
    if failed is not None:
        if run.ranks.rank > 0:
            run.ranks.tell()  # the first one says it: this wait ends when that one has ended
        done = "no step was taken" if saved is None else f"step {run.step} is saved in {saved}"
        raise CallbackError(
            f"the callback {failed.name} failed in {failed.event} ({failed.said}); {done}. The same command "
            "goes on from there; without the callback (log.to) nothing else changes"
        ) from failed.error


def end_early(run: Run, reason: str) -> None:
    """Say why a run ends before its last step; after a signal or a callback it is not done."""
    if run.evaluator.best_tracker.has_stopped:
        _log.info("stopped after step %d: %s", run.step, reason)
        return
    _log.warning(
        "stopped by %s after step %d, which is saved; the same command goes on from there", reason, run.step
    )
    sys.exit(EXIT_STOPPED)


@contextmanager
def stop_flag(ranks: Ranks | Alone = ALONE) -> Iterator[threading.Event]:
    """Let the first stop signal finish the step; a second one ends the process as usual.

    Of several ranks, which all come here, the first one looks at signals, and the others ignore them. Their
    launcher decides about a second one: a job's end may signal each process and the launcher, which passes
    signals on.
    """
    stop = threading.Event()
    is_first = ranks.rank == 0
    if is_first:
        ranks.meet("orders")  # from now on the other ranks leave signals to this one
    numbers = stop_signals() if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            return
        stop.set()
        if ranks.size == 1:
            for each in numbers:  # a closed terminal may signal twice, and means one stop
                signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else previous[each])
        _log.warning("the run is asked to stop: it finishes the step and saves")

    for number in numbers:
        signal.signal(number, handle if is_first else signal.SIG_IGN)
    try:
        if not is_first:
            ranks.meet("orders")
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, previous[number])
