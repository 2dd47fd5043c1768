"""The save of the last whole step when an error ends a run: only the step that has failed is lost.

An error in a step leaves the state that the step before has left, unless an update ended in the middle; the
engine knows which (`Integrity`). A save after a failed allocation has to find memory, so what the step has
held is let go of first.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatrain.checkpoint.load import find_step, verify
from megatrain.checkpoint.save import LeftOverError, RoomMadeError, save
from megatrain.config.choice import Updates
from megatrain.errors import CallbackError, DivergedError, MegatrainError, RankError, as_ours, first_line
from megatrain.train.faults.recovery import newest_point
from megatrain.train.last_good import LastGood
from megatrain.train.out_of_memory import let_go, memory_error
from megatrain.train.records.directory import MovedError, RunDirectory
from megatrain.train.run import Run

_log = logging.getLogger(__name__)

TOLD = (DivergedError, CallbackError, MovedError)
"""The errors that say themselves what is saved: a run that diverged goes back, and what a callback's error
leaves is saved, as is what a directory that was moved leaves."""
NOT_IN_RAM = "not all of its state is in RAM, so nothing is saved"


@contextmanager
def rescued(
    run: Run, directory: RunDirectory, together: Callable[[Exception], str] | None = None
) -> Iterator[None]:
    """Save the last whole step when an error inside ends the run, and name its checkpoint in the error.

    Of several nodes, and with `optim.updates=immediate`, nothing is saved: the error names the newest point.

    Args:
        run: The run.
        directory: Its directory.
        together: What saves it together with other ranks, after an error, and says what is saved; empty where
            the error does. None: there are no others, or some are on other nodes.

    Raises:
        MegatrainError: The error inside, with what is saved.
    """
    try:
        yield
    except Exception as error:
        told = memory_error(error, run.config, run.planned, f"in step {run.step + 1}") or as_ours(error)
        is_torn = run.engine.arrangement.integrity.cause is not None
        if together is not None:
            said = together(error)
        elif isinstance(error, (*TOLD, RankError)) or is_torn or run.ranks.size > 1:
            raise
        else:
            let_go(error)
            said = _saved(run, directory, error)
        if is_torn or not said:
            raise
        if told is None:
            _log.warning("an error ends the run: %s", said)
            raise
        told.args = (f"{told}. {said[0].upper()}{said[1:]}", *told.args[1:])
        if told is error:
            raise
        raise told from error


def _saved(run: Run, directory: RunDirectory, error: Exception) -> str:
    """Save the last whole step, if it can be, after an error, and say what is saved."""
    if run.engine.choice.updates == Updates.IMMEDIATE.value:
        return not_saved("with optim.updates=immediate nothing is saved", run, directory)
    return save_whole(run, directory, run.whole_meta, run.write, first_line(error))


def held(run: Run) -> tuple[int, str]:
    """Let the state change no more, for ever; return how many of the engine's steps RAM holds.

    Nobody is waited for, since a lane or the device may hang.

    Returns:
        The steps, and why their state cannot be saved from RAM; empty: it can.
    """
    arrangement = run.engine.arrangement
    num_held = arrangement.integrity.stop()
    if run.engine.choice.updates == Updates.IMMEDIATE.value:
        return 0, "with optim.updates=immediate nothing is saved"
    if num_held is None:
        return 0, "an update hangs in the middle, so nothing is saved"
    if arrangement.executor.states.has_newer:
        return 0, "its state is newer on the device than in RAM, so nothing is saved"
    if run.engine.host.on_device.held:
        return 0, NOT_IN_RAM
    return num_held, ""


def not_saved(why: str, run: Run, directory: RunDirectory) -> str:
    """Say why nothing is saved, and from where the same command goes on."""
    return f"{why}: {_goes_on(newest_point(run, directory))}"


def save_whole(
    run: Run,
    directory: RunDirectory,
    meta_of: Callable[[], dict[str, object] | None],
    write: Callable[[Path], None],
    reason: str,
) -> str:
    """Save the last whole step, unless its checkpoint is there, and say what is saved.

    Args:
        run: The run.
        directory: Its directory.
        meta_of: The function that returns what the manifest keeps of that step; None of a run without any.
        write: What writes the files of the checkpoint.
        reason: Why the run ends.
    """
    try:
        meta = meta_of()
        if meta is None:
            return _goes_on(newest_point(run, directory))
        step = int(meta["step"])  # type: ignore[call-overload]
        path = _whole_checkpoint(directory, step)
        if path is None:
            _log.warning("step %d is saved before the run ends: %s", step, reason)
            path = _save(run, directory, step, meta, write)
    except Exception as failed:
        is_ours = isinstance(failed, MegatrainError)
        why = str(failed).partition("; ")[0] if is_ours else f"{type(failed).__name__}: {failed}"
        return not_saved(f"what was trained since could not be saved ({why})", run, directory)
    return f"step {step} is saved in {path}, and the same command goes on from there"


def _goes_on(point: str) -> str:
    return f"the same command goes on from {point}"


def _whole_checkpoint(directory: RunDirectory, step: int) -> Path | None:
    if not directory.checkpoints.is_dir() or (path := find_step(directory.checkpoints, step)) is None:
        return None
    try:
        verify(path, digests=False)
    except MegatrainError:
        return None
    return path


def _save(
    run: Run, directory: RunDirectory, step: int, meta: dict[str, object], write: Callable[[Path], None]
) -> Path:
    keep_last, good = run.config.checkpoint.keep_last or sys.maxsize, LastGood()
    good.restore(meta["last_good"])  # type: ignore[arg-type]
    good.save(step, keep_last)
    began_s = time.monotonic()
    saved = partial(
        save,
        directory.checkpoints,
        step=step,
        write=write,
        meta=meta | {"last_good": good.state()},
        keep_last=keep_last,
        keep_too=run.evaluator.kept_steps.union(good.kept),
    )
    try:
        try:
            path = saved()
        except RoomMadeError as full:
            _log.warning("%s", full)
            path = saved()
    except LeftOverError as left:
        path = left.path
        _log.warning("%s", left)
    run.save_s = time.monotonic() - began_s
    run.tell_of(step, "checkpoint")
    return path
