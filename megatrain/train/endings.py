"""How a run ends before its last step: by a signal, a callback that has failed, or an early stop."""

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
"""EX_TEMPFAIL: stopped by a signal after saving; the same command goes on."""


def refuse_failed_callback(run: Run, saved: Path | None) -> None:
    """End a run one of whose callbacks has raised; `saved` has its state, None: there is nothing new.

    Raises:
        CallbackError: One has.
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
    """Say why a run has ended before its last step; after a signal or a callback it is not done."""
    if run.evaluator.standing.has_stopped:
        _log.info("stopped after step %d: %s", run.step, reason)
        return
    _log.warning(
        "stopped by %s after step %d, which is saved; the same command goes on from there", reason, run.step
    )
    sys.exit(EXIT_STOPPED)


@contextmanager
def stop_flag(*, is_alone: bool = True) -> Iterator[threading.Event]:
    """Let the first signal that asks for it finish the step; a second one ends the process as it always does.

    Args:
        is_alone: There is one rank. Of several, the launcher decides what a second signal means: what ends a
            job may tell each of its processes, and the launcher tells the ranks too.
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
            for each in numbers:  # a terminal that is closed may say so twice, and means it once
                signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else previous[each])
        _log.warning("asked to stop: finishing the step, then saving")

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, previous[number])
