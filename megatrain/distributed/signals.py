"""Which signals ask a run to finish its step, save and end, and what one means when ranks are lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

WARNINGS = frozenset({signal.SIGHUP, signal.SIGUSR1})
"""The signals that may come more than once, and never mean that a process is to end at once."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals of Ctrl-C, of a scheduler, and of a terminal that is closed.

    The last one, SIGHUP, is left alone where it is ignored already, as `nohup` makes it. SIGUSR1, which Slurm
    sends some time before a job's end if it is asked to (`--signal=USR1@600`), is left alone where it has a
    handler.
    """
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    is_free = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    warnings = [*([signal.SIGHUP] if hangs_up else []), *([signal.SIGUSR1] if is_free else [])]
    return (signal.SIGINT, signal.SIGTERM, *warnings)


def ignore_sigterm_once(is_lost: Callable[[], bool]) -> None:
    """Let SIGTERM do what it did, until a rank is lost: then this process ends by itself, and says why.

    A launcher sends it to whoever outlives the first of its ranks that ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        if is_lost():
            return
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)


def ignore_sigterm() -> None:
    """Let SIGTERM do nothing, in Python's own end too: that takes handlers away, but not this."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
