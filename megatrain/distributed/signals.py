"""Which signals ask a run to finish its step, save and end."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals of Ctrl-C, of a scheduler, and of a terminal that is closed.

    The last one, SIGHUP, is left alone where it is ignored already, as `nohup` makes it.
    """
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else []))
