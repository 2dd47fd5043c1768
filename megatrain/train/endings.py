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

from megatrain.distributed.signals import stop_signals
from megatrain.errors import CallbackError
from megatrain.train.run import Run

_log = logging.getLogger(__name__)

EXIT_STOPPED = 75
"""EX_TEMPFAIL: a signal stopped the run after it was saved; the same command resumes it."""


def refuse_failed_callback(run: Run, saved: Path | None) -> None:
    """End a run after a callback has raised; `saved` is the checkpoint of its state, None if there is none.

    Raises:
        CallbackError: A callback has raised.
    """
    failed = run.callbacks.failure
    if failed is not None:
        done = "no step was taken" if saved is None else f"step {run.step} is saved in {saved}"
        raise CallbackError(
            f"the callback {failed.name} failed in {failed.event} ({type(failed.error).__name__}: "
            f"{failed.error}); {done}. The same command goes on from there; without the callback "
            "(log.to) nothing else changes"
        ) from failed.error


def end_early(run: Run, reason: str) -> None:
    """Say why a run ends before its last step; after a signal or a callback it is not done."""
    if run.evaluator.standing.has_stopped:
        _log.info("stopped after step %d: %s", run.step, reason)
        return
    _log.warning(
        "stopped by %s after step %d, which is saved; the same command goes on from there", reason, run.step
    )
    sys.exit(EXIT_STOPPED)


@contextmanager
def stop_flag(*, is_alone: bool = True) -> Iterator[threading.Event]:
    """Let the first stop signal finish the step; a second one ends the process as usual.

    Args:
        is_alone: Whether there is a single rank. With several, the launcher decides about a second signal,
            since a job's end may signal each process as well as the launcher, which signals the ranks too.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = stop_signals()
    previous = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            return
        stop.set()
        if is_alone:
            for each in numbers:  # a closed terminal may signal twice, and means one stop
                signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else previous[each])
        _log.warning("the run is asked to stop: it finishes the step and saves")

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, previous[number])
