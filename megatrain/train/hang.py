"""The end of a run that hangs in a step, an evaluation or a save: stacks, the last whole step, exit code 8.

The launching thread, a lane or the device does not come back, so nothing here waits for any of them: the
state is saved from RAM where it is whole and at home, and the process ends without its own clean-up.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from megatrain.distributed.guard import Moves, RunningClock
from megatrain.errors import HangError
from megatrain.train.faults.rescue import NOT_IN_RAM, held, not_saved, save_whole
from megatrain.train.hang_watch import HangWatch
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.metrics import format_duration
from megatrain.train.run import Run
from megatrain.train.saves.saves import Saves

_log = logging.getLogger(__name__)

LEAST_S = 60.0
"""The least time without progress after which what is done at the end is given up."""
WORDS_S = 10.0
"""The time in which an end is told; a log may be on what hangs."""
_LOOK_S = 0.05


@contextmanager
def hangs_ended(run: Run, directory: RunDirectory, saves: Saves) -> Iterator[None]:
    """Watch what is done inside, and end this process when it hangs, if it is the only one of its run."""
    after = run.config.train.hang_after
    if after is None or run.ranks.size > 1:
        yield
        return

    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in saves.threads if thread.ident]

    def progress() -> object:
        # a chunk may take long, and what is done before and after the chunks has none
        saving_s = sum(map(time.clock_gettime, clocks))
        try:
            return run.engine.lanes.newest_s(), saving_s
        except Exception as error:  # of a device that is lost; the run's own thread raises it, or hangs
            return type(error)

    with HangWatch(after, progress, partial(_end, run, directory, saves)) as run.hang_watch:
        try:
            yield
        finally:
            run.hang_watch = None


def _end(run: Run, directory: RunDirectory, saves: Saves, silent_s: float, what: str) -> NoReturn:
    """Leave all that can be left, and end the process."""
    patience_s, what = max(LEAST_S, silent_s), what or _where(run)
    try:
        said = [f"{what} has made no progress for {format_duration(silent_s)}"]
        _try(lambda: said.append(directory.write_stacks()), lambda: 0, patience_s)
        saved: list[str] = []
        _try(lambda: saved.append(_save(run, directory, saves, what)), lambda: saves.num_left, patience_s)
        if not saved:
            why = "The last step could not be saved, since that makes no progress either"
            _try(lambda: saved.append(not_saved(why, run, directory)), lambda: 0, WORDS_S)
            saved = saved or [why]  # the disk does not even tell what it has
        said += saved
        _try(lambda: _tell(run, said), lambda: 0, WORDS_S)
    finally:
        os._exit(HangError.exit_code)


def _where(run: Run) -> str:
    """Say which step hangs, and how far it has come."""
    step, passed = int(run.beginnings[-1].position["step"]) + 1, run.engine.passed()
    if passed is None:
        return f"step {step}"
    return f"step {step} ({passed.num_visits:,} of {passed.num_foreseen:,} passes of layers)"


def _save(run: Run, directory: RunDirectory, saves: Saves, what: str) -> str:
    """Save the last whole step, if all of it is in RAM, and say what is saved."""
    num_held, why = held(run)
    write = saves.writes_at_rest()  # waits for a checkpoint that is under way, which may be the newest then
    if why or write is None:
        said = not_saved(why or NOT_IN_RAM, run, directory)
    else:
        said = save_whole(run, directory, partial(run.meta_of, num_held), write, f"{what} hangs")
    return f"{said[0].upper()}{said[1:]}"


def _tell(run: Run, said: list[str]) -> None:
    first, *others = said
    text = ". ".join([f"{first} (train.hang_after): the device, a driver or a drive hangs", *others])
    _log.error("%s", text)
    run.tell("error", text=text, exit_code=HangError.exit_code)
    if run.config.log.webhook is not None:
        time.sleep(WORDS_S / 2)  # another thread sends it


def _try(work: Callable[[], object], progress: Callable[[], object], patience_s: float) -> None:
    """Do something in another thread, until it is done, fails, or makes no progress."""
    clock, moves = RunningClock(20 * _LOOK_S), list[Moves]()

    def run() -> None:
        moves.append(Moves(clock))
        try:
            work()
        except Exception as error:
            _log.error("a run that hangs: %s", error)

    thread = threading.Thread(target=run, name="hang-end", daemon=True)
    thread.start()
    seen, seen_s = progress(), clock.now()
    while thread.is_alive():
        thread.join(_LOOK_S)
        if (now := progress()) != seen:
            seen, seen_s = now, clock.now()
        silent_s = clock.now() - seen_s
        if silent_s > patience_s and (not moves or moves[0].idle_s() > patience_s):
            return
