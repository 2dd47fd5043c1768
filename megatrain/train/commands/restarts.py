"""A run that is started again after an end that another start may mend: `megatrain train --restarts N`.

The process that starts the others does nothing else, so it outlives them: it takes no memory of note, passes
signals on, and says how each of them has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megatrain.checkpoint.load import find, step_of
from megatrain.config.sizes import counted
from megatrain.distributed.processes import how_ended
from megatrain.distributed.signals import stop_signals
from megatrain.errors import CapacityError, HangError, MegatrainError, RankError, TornStateError
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.events import EventLog
from megatrain.train.records.json_lines import read_rows

_log = logging.getLogger(__name__)

_MENDABLE = {1, TornStateError.exit_code, RankError.exit_code, HangError.exit_code}
"""The exit codes after which another start may go on: of what nobody foresaw, a torn state, a rank that was
lost, and a hang."""

SAME_STEP = 2
"""How often a run may end at one step."""


class Restarts:
    """Decides whether a run that has ended is started again.

    It is after a crash or a kill, after an unforeseen error or a torn state, after a rank that was lost, and
    after memory that ran out when steps had been taken. It is not after an error that would come again
    (settings, data, room, divergence), nor when it has ended twice at the same step.
    """

    def __init__(self, directory: RunDirectory, restarts: int, root: Path = Path("/")) -> None:
        """Begin with none used.

        Args:
            directory: The directory of the run.
            restarts: The number of times that it is started again at most.
            root: The root of the file system that `/proc` is read from.
        """
        self._directory, self._left, self._root = directory, restarts, root
        self._ends: dict[int, int] = {}
        self._begin()

    def _begin(self) -> None:
        """Note how far the run is, and how many processes were killed, as it is about to be started."""
        self._begun, self._kills = reached(self._directory), oom_kills(self._root)

    def wants(self, code: int, *, records: bool = False) -> bool:
        """Return whether the run is to be started again, and say so.

        Args:
            code: What it has ended with; negative: the signal that killed it.
            records: Whether the event of an end that the run could not record itself is written.
        """
        step = reached(self._directory)
        said = _said(code, killed=(oom_kills(self._root) or 0) - (self._kills or 0))
        if code < 0 and records:
            _record(self._directory, step, said, exit_code_of(code))
        self._ends[step] = self._ends.get(step, 0) + 1
        has_grown = code == CapacityError.exit_code and step > self._begun
        if 0 <= code < 128 and code not in _MENDABLE and not has_grown:
            return False
        if not self._left:
            _log.error("the run %s after step %d; --restarts allows no further start", said, step)
            return False
        if self._ends[step] >= SAME_STEP:
            text = "the run %s, for the second time after step %d; it is not started a third time"
            _log.error(text, said, step)
            return False
        self._left -= 1
        text = "the run %s after step %d; starting it again (%s left)"
        _log.warning(text, said, step, counted(self._left + 1, "start"))
        self._begin()
        return True


def run_again(
    command: Callable[[], Sequence[str]], directory: RunDirectory, *, restarts: int, root: Path = Path("/")
) -> int:
    """Run a command to its end, again where `Restarts` wants that, and return its exit code.

    A signal that asks to stop is passed on, and the run is not started again after it.

    Args:
        command: The function that returns the command, asked at each start.
        directory: The directory of its run.
        restarts: The number of times that it is run again at most.
        root: The root of the file system that `/proc` is read from.
    """
    policy = Restarts(directory, restarts, root)
    while True:
        with _passing_on() as child:
            code = child.run(command())
        if code == 0 or child.signals or not policy.wants(code, records=True):
            return exit_code_of(code)


def exit_code_of(code: int) -> int:
    """Return the exit code by which shells know an end; `code` is negative: the signal that killed it."""
    return code if code >= 0 else 128 - code


def reached(directory: RunDirectory) -> int:
    """Return the newest step that the records of a run tell of, 0 for none."""
    rows = [int(row["step"]) for row in read_rows(directory.metrics) if isinstance(row.get("step"), int)]
    try:
        saved = [step_of(path) for path in find(directory.checkpoints)]
    except MegatrainError:  # the next start says what is wrong with it
        saved = []
    return max([0, *rows, *saved])


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel has killed for lack of memory, in containers too; None: not told.

    Source: proc_vmstat(5).
    """
    try:
        lines = (root / "proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    counts: Mapping[str, str] = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


def _said(code: int, *, killed: int) -> str:
    said = how_ended(code)
    if code != -signal.SIGKILL:
        return said
    if killed > 0:
        return f"{said}: memory ran out, says the kernel (have less planned, with memory.host_limit)"
    return f"{said}, by somebody, or for lack of memory that the kernel does not tell of"


def _record(directory: RunDirectory, step: int, said: str, exit_code: int) -> None:
    if directory.is_run:
        with EventLog(directory.events) as events:
            events.write("error", step, text=f"the run {said}", exit_code=exit_code)


class _Child:
    """The process that is running, to which signals are passed on."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def take(self, number: int, _: FrameType | None) -> None:
        self.signals.append(number)
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, command: Sequence[str]) -> int:
        # in a group of its own, or Ctrl-C would reach it twice, which means to end at once
        self._process = subprocess.Popen(command, preexec_fn=os.setpgrp)
        for number in self.signals:
            self._process.send_signal(number)
        return self._process.wait()


@contextmanager
def _passing_on() -> Iterator[_Child]:
    child, numbers = _Child(), stop_signals()
    previous = {number: signal.signal(number, child.take) for number in numbers}
    try:
        yield child
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def command_of(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `megatrain` with these arguments in another process."""
    return [sys.executable, "-m", "megatrain", *arguments]
