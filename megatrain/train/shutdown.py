"""The endings of a run before its last step: by a signal, a failed callback, or an early stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megatrain.distributed.alone import ALONE, Alone
from megatrain.distributed.signals import WARNINGS, stop_signals
from megatrain.errors import CallbackError
from megatrain.train.records.metrics import format_duration
from megatrain.train.run import Run

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

EXIT_STOPPED = 75
"""EX_TEMPFAIL: a signal stopped the run after it was saved; the same command resumes it."""

GRACE_S = 1.8
"""The seconds in which a process that was signalled twice may end by itself; 2 with its last words."""
_WORDS_S = 0.2
"""The seconds in which that is told: the log may be on what hangs."""


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


def what_follows(run: Run) -> str:
    """Return what a run does when it is asked to stop, with the times that are known; on any thread."""
    step = "" if run.within is None else run.within.describe()
    takes = "" if run.save_s is None else f" (the last time it took {format_duration(run.save_s)})"
    first = f"it finishes {step}" if step else "it finishes what it is at"
    return f"{first}, saves{takes} and ends"


@contextmanager
def stop_flag(
    ranks: Ranks | Alone = ALONE, follows: Callable[[], str] = lambda: "it finishes the step, saves and ends"
) -> Iterator[threading.Event]:
    """Let the first stop signal finish the step; a second one ends the process as usual, or after `GRACE_S`.

    Another thread says at once what follows: this one may be in a call that no signal interrupts, such as a
    wait for the device.

    Of several ranks, which all come here, the first one looks at signals, and the others ignore them. Their
    launcher decides about a second one: a job's end may signal each process and the launcher, which passes
    signals on.

    Args:
        ranks: The ranks that come here.
        follows: The function that says what the run does when it is asked to stop.
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
                signal.signal(each, signal.SIG_IGN if each in WARNINGS else previous[each])

    def say() -> None:
        again = "; a second Ctrl-C ends it at once, without this step" if ranks.size == 1 else ""
        _log.warning("the run is asked to stop: %s%s", follows(), again)

    hears = is_first and bool(numbers)
    heard = _Heard(numbers, say, ends=ranks.size == 1) if hears else nullcontext()
    for number in numbers:
        signal.signal(number, handle if is_first else signal.SIG_IGN)
    try:
        if not is_first:
            ranks.meet("orders")
        with heard:
            yield stop
    finally:
        for number in numbers:
            signal.signal(number, previous[number])


class _Heard:
    """A thread that hears of signals as they come, whatever the main one is in. Use as a context manager."""

    def __init__(self, numbers: Collection[int], say: Callable[[], object], *, ends: bool) -> None:
        """Hear of nothing yet.

        Args:
            numbers: The signals that ask for a stop.
            say: The function that is called at the first of them.
            ends: Whether a second one ends the process, if it has not ended by itself after `GRACE_S`.
        """
        self._numbers, self._say, self._ends = frozenset(numbers), say, ends
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        reads, self._writes = socket.socketpair()
        self._writes.setblocking(False)
        self._before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(reads,), name="signals", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        signal.set_wakeup_fd(self._before)
        self._writes.close()

    def _hear(self, reads: socket.socket) -> None:
        count = 0
        with reads:
            while heard := reads.recv(64):
                for number in heard:
                    if number not in self._numbers or (count and number in WARNINGS):
                        continue
                    count += 1
                    if count == 1:  # where the log hangs, a second one must be heard all the same
                        threading.Thread(target=self._say, name="stop-said", daemon=True).start()
                    elif count == 2 and self._ends:
                        threading.Thread(target=self._end, args=(number,), daemon=True).start()

    def _end(self, number: int) -> None:
        if not self._is_over.wait(GRACE_S):
            text = "ended at once: what is not saved is lost; the same command goes on from what is"
            words = threading.Thread(target=_log.error, args=(text,), daemon=True)
            words.start()
            words.join(_WORDS_S)
            os._exit(128 + number)
