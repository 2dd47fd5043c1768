"""The end of several ranks after an error: the last whole step is saved, if all of them hold it.

Each rank updates a share of every block, in memory that those of a node map. So their state is that of a step
where all hold the same one, and none changes it any more. They tell each other so in memory too, since a rank
that ends answers to nothing else. The first one saves, and the others stay until it has.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.distributed.cells import shared_cells
from megatrain.distributed.processes import status_of
from megatrain.errors import RankError, first_line
from megatrain.train.faults.rescue import NOT_IN_RAM, TOLD, held, not_saved, save_whole
from megatrain.train.out_of_memory import let_go
from megatrain.train.records.directory import RunDirectory
from megatrain.train.run import Run
from megatrain.train.saves.saves import Saves

if TYPE_CHECKING:
    from megatrain.distributed.alone import Alone
    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)

_LOOK_S = 0.02
_TEXT_BYTES = 4096
_NONE = -1
"""A rank holds no whole step, or not all of it in RAM."""


class Ending:
    """What ranks of a node tell each other at the end, in memory that they share."""

    def __init__(self, ranks: Ranks | Alone) -> None:
        """Map the memory; all ranks call it, and there are several."""
        size = ranks.size
        cells = shared_cells(ranks, size + 1 + _TEXT_BYTES // 8)
        self._held, self._length = cells[:size], cells[size : size + 1]  # of the text, and 1; 0: not said yet
        self._text = cells[size + 1 :].view(np.uint8)
        self._processes = [int(process) for process in ranks.gather_values(os.getpid())]
        self._rank = ranks.rank
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        """Return whether the calling thread is the first one of this process to come to its end."""
        return self._claimed.acquire(blocking=False)

    def post(self, step: int) -> None:
        """Let the others know which whole step this rank holds, which it will not change any more."""
        self._held[self._rank] = step

    def agreed(self) -> tuple[int | None, bool]:
        """Wait for all; return the step that all hold, if there is one, and whether none of them is gone."""
        for rank, process in enumerate(self._processes):
            while not self._held[rank]:
                if not _lives(process):
                    return None, False
                time.sleep(_LOOK_S)
        steps = set(self._held.tolist())
        step = steps.pop()
        return (None if steps or step == _NONE else step), True

    def finish(self, said: str) -> None:
        """Tell the others what is saved, for which they wait; the first rank calls it."""
        text = said.encode()[:_TEXT_BYTES]
        self._text[: len(text)] = np.frombuffer(text, np.uint8)
        self._length[0] = len(text) + 1

    def said(self) -> str:
        """Wait for what the first rank says is saved; nothing if it is gone."""
        while not self._length[0]:
            if not _lives(self._processes[0]):
                return ""
            time.sleep(_LOOK_S)
        return bytes(self._text[: int(self._length[0]) - 1]).decode(errors="replace")


def ending_of(ranks: Ranks | Alone) -> Ending | None:
    """Return what ranks need to end together; None: there is one, or no node has all of the state."""
    return Ending(ranks) if ranks.size > 1 and ranks.num_nodes == 1 else None


def saved_together(run: Run, directory: RunDirectory, ending: Ending, error: Exception) -> str:
    """Save the last whole step of all ranks, after an error of this one or of another, and say what is saved.

    Empty: the error says that itself, or a rank is gone, and with it what it held.
    """
    if not ending.claim():
        threading.Event().wait()  # another thread ends this process
    with run.ranks.watch.finishing():
        if not isinstance(error, RankError):
            run.ranks.watch.ends(error)
        let_go(error)
        with suppress(Exception):  # what has failed is known
            run.engine.settle()
        writes = None if isinstance(error, TOLD) else lambda: run.write
        return _saved(run, directory, ending, first_line(error), writes)


@contextmanager
def late_ranks_ended(
    run: Run, directory: RunDirectory, saves: Saves, ending: Ending | None
) -> Iterator[None]:
    """Let the watch save from RAM where a rank is missing and the run's own thread does not learn of it."""
    if ending is not None:
        run.ranks.watch.at_end = partial(_end_late, run, directory, saves, ending)
    try:
        yield
    finally:
        run.ranks.watch.at_end = None


def _end_late(run: Run, directory: RunDirectory, saves: Saves, ending: Ending) -> str | None:
    """Do what `saved_together` does, for a run whose thread hangs or is busy; None: that one does it."""
    if not ending.claim():
        return None
    with suppress(Exception):
        directory.write_stacks(run.ranks.rank)
    return _saved(run, directory, ending, "a rank is missing", saves.writes_at_rest)


def _saved(
    run: Run,
    directory: RunDirectory,
    ending: Ending,
    reason: str,
    writes: Callable[[], Callable[[Path], None] | None] | None,
) -> str:
    """Agree with the other ranks on the step that all hold; the first one saves it, and all say so.

    Args:
        run: The run, of which nothing changes any more.
        directory: Its directory.
        ending: What ranks tell each other.
        reason: Why the run ends.
        writes: The function that returns what writes the files of the checkpoint, or None where RAM does not
            have all of them. None: this rank's error says itself what is saved, and nothing is here.

    Returns:
        What is saved, or from where the same command goes on; empty: nobody knows, or an error says it.
    """
    num_held, step = 0, _NONE
    with suppress(Exception):  # the others wait
        num_held, why = held(run)
        meta = None if why or writes is None else run.meta_of(num_held)
        step = _NONE if meta is None else int(meta["step"])
    ending.post(step)
    if run.ranks.rank > 0:
        return ending.said()
    said = ""
    try:
        agreed, are_all = ending.agreed()
        if writes is not None and are_all:
            write = writes()
            if agreed is None:
                said = not_saved("no step is whole on all ranks, so nothing is saved", run, directory)
            elif write is None:
                said = not_saved(NOT_IN_RAM, run, directory)
            else:
                said = save_whole(run, directory, partial(run.meta_of, num_held), write, reason)
    except Exception as error:
        _log.error("the last step of all ranks could not be saved: %s", error)
    finally:
        ending.finish(said)
    return said


def _lives(process: int) -> bool:
    found = status_of(process)
    return found is not None and found[0] not in "ZX"
