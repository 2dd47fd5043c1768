"""What the kernel says of this machine and its processes, and what one of these tells its launcher."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

OF_RANK = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What a launcher says in the environment of each process that it starts, beside `WORLD_SIZE`."""


def machine() -> str:
    """Return what no other machine has, nor this one after it is started anew."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def status_of(process: int) -> list[str] | None:
    """Return what a process's `stat` has behind its name: its state, its parent, ...; None: it has ended.

    Source: proc_pid_stat(5). A name may have spaces and brackets in it.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()


def how_ended(code: object) -> str:
    """Say what an exit code means; negative: the signal that killed the process."""
    if isinstance(code, int) and code < 0:
        with suppress(ValueError):  # a signal that has no name here
            return f"was killed ({signal.Signals(-code).name})"
    return f"ended with {code}"


def tell_launcher(sentence: str) -> None:
    """Leave the sentence that this process ends with to PyTorch's launcher, if it was started by that."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with suppress(OSError):  # it then knows the exit code alone
            Path(file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))
