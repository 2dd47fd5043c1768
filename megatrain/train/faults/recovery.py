"""The errors of a failed step or update: they name the point from which the same command resumes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.checkpoint.load import find, find_step, step_of
from megatrain.errors import DivergedError, HardwareError, MegatrainError, TornStateError
from megatrain.train.faults.replay import Verdict
from megatrain.train.faults.watching import with_way_out
from megatrain.train.out_of_memory import memory_error
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.metrics import StepMetrics
from megatrain.train.resume.state_commits import held_by
from megatrain.train.run import Run

_log = logging.getLogger(__name__)

_VERDICTS = {
    Verdict.DATA.value: ", and did so in two more runs of the step, bit for bit: look at its rows",
    Verdict.UNKNOWN.value: ", and whether the machine or the data are to blame cannot be told, since the "
    "step has no form that repeats its bits",
}
"""What a replay adds to the warning about a jump."""


@contextmanager
def resume_point_told(run: Run, directory: RunDirectory) -> Iterator[None]:
    """Name the point to resume from in an error inside that has torn the state, of which nothing was saved.

    Raises:
        HardwareError: A value in RAM has changed by itself.
        TornStateError: The error inside has torn the state.
        CapacityError: Memory has run out, and the state is whole.
    """
    try:
        yield
    except Exception as error:
        first = run.engine.arrangement.integrity.cause
        fault = error if isinstance(error, HardwareError) else first
        if isinstance(fault, HardwareError):
            raise with_way_out(fault, run, directory.checkpoints) from error
        if first is None and isinstance(error, MegatrainError):
            raise
        if first is None:
            told = memory_error(error, run.config, run.planned, f"in step {run.step + 1}")
            if told is None:
                raise
            raise told from error
        raise TornStateError.after(
            first,
            "so an update ended in the middle, and its state is lost; nothing of it was saved. Start the "
            "same command again, with checkpoint.resume=auto: it goes on from "
            f"{newest_point(run, directory)}",
        ) from error


def newest_point(run: Run, directory: RunDirectory) -> str:
    """Name the point that `auto` takes: the newest checkpoint, if it is whole, or the commit on drives."""
    try:
        saved = next(iter(find(directory.checkpoints)), None)
        held = held_by(run.config, num_nodes=run.ranks.num_nodes)
    except MegatrainError:  # the resuming command reports what is wrong with it
        return "the newest checkpoint that is whole"
    step = 0 if saved is None else step_of(saved)
    if held[0] > step:
        return f"step {held[0]}, which is committed on the drives"
    return "the beginning, since nothing was saved before" if saved is None else str(saved)


def check_divergence(run: Run, row: StepMetrics, directory: RunDirectory) -> None:
    """Report a skipped step or a jump of the loss, and end the run where its settings say so.

    Raises:
        DivergedError: The settings end the run.
    """
    train, optim = run.config.train, run.config.optim
    jump = ""
    if row.spike_above is not None:
        run.tell("spike", loss=row.loss, above=row.spike_above)
        jump = f"the loss jumped to {row.loss:.4g}, above {row.spike_above:.4g} (train.on_spike)"
        jump += _VERDICTS.get(row.replay or "", "")
        _log.warning("step %d: %s%s", row.step, jump, "; it makes no update" if row.skipped else "")
    if row.skipped:
        run.tell("skipped", reason=jump or "the gradient was not finite")
    if jump and train.on_spike == "stop":
        newest = next(iter(find(directory.checkpoints)), None)
        where = "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest}"
        raise DivergedError(
            f"step {row.step}: {jump}, and nothing was updated in it; {where}. Look at its data, lower "
            "optim.lr, or go on with train.on_spike=skip"
        )
    if row.grad_norm is not None and not (row.skipped or math.isfinite(row.grad_norm)):
        raise DivergedError(
            f"step {row.step}: the gradient's norm is {row.grad_norm}, and with optim.updates=immediate its "
            "layers were updated before that was known, so nothing of it is saved. The same command with "
            "optim.updates=deferred goes on from the newest checkpoint and skips such a step"
        )
    if run.skipped_in_a_row >= optim.max_skipped_steps:
        raise DivergedError(
            f"{run.skipped_in_a_row} steps in a row were skipped, up to step {run.step}, for gradients that "
            "were not finite or jumps of the loss; nothing was updated in them. "
            f"{_before_skips(run, directory)}"
        )


def _before_skips(run: Run, directory: RunDirectory) -> str:
    """Return advice after skipped steps, with the newest surely sound checkpoint."""
    step = run.last_good.sound
    sound = None if step is None else find_step(directory.checkpoints, step)
    if sound is None:
        return (
            "No checkpoint is older than the first of them: look at the model and the data, or lower optim.lr"
        )
    return (
        f"The newest checkpoint that is surely sound is {sound}: lower optim.lr, and go on from it with "
        f"--resume {sound} and another --out"
    )
