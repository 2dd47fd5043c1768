"""The watch over the state in RAM during a run, and the way out when a value has changed by itself."""

from __future__ import annotations

from pathlib import Path

from megatrain.checkpoint.load import find, step_of
from megatrain.errors import HardwareError, MegatrainError
from megatrain.plan.cost.watching import OPEN_ROTATION, rotation_of
from megatrain.train.resume.state_commits import held_by
from megatrain.train.run import Run

_TEST = "test the machine (megatrain doctor counts errors of memory, memtest86+ finds others)"


def begin_watch(run: Run) -> None:
    """Watch the state from the next step on, as planned; all ranks call it."""
    wish = run.config.memory.watch
    if run.planned is not None:
        rotation = run.planned.watching.rotation
    else:
        rotation = rotation_of(1 / OPEN_ROTATION if wish == "auto" else wish, 0.0, 1.0)
    rotation = run.ranks.tell(rotation)
    if rotation is not None:
        run.optimizer.watch_memory(rotation).step = run.step


def end_watch(run: Run) -> None:
    """Compare all that is watched, before the last checkpoint of the run is written.

    Raises:
        HardwareError: A value has changed by itself.
    """
    if run.optimizer.memory_watch is not None:
        with run.watched(f"step {run.step}"):
            run.engine.settle()
        run.optimizer.memory_watch.check_all()


def with_way_out(error: HardwareError, run: Run, checkpoints: Path) -> HardwareError:
    """Return an error with the newest checkpoint that is from before the fault, and how to go on from it."""
    told = _told(error, run, checkpoints)
    told.is_told = error.is_told
    return told


def _told(error: HardwareError, run: Run, checkpoints: Path) -> HardwareError:
    try:
        saved = find(checkpoints)
        committed = held_by(run.config, num_nodes=run.ranks.num_nodes)[0]
    except MegatrainError as other:
        return HardwareError(f"{error}; and {other}; {_TEST}", since=error.since)
    sound = next((path for path in saved if step_of(path) < error.since), None)
    newest = max([committed, *map(step_of, saved[:1])])
    if newest >= error.since and sound is not None:
        where = (
            f"the newest checkpoint from before that is {sound}: go on from it with --resume {sound} and "
            "another --out"
        )
    elif newest >= error.since or newest < 0:
        where = "no checkpoint is from before that, so begin again"
    else:
        point = f"step {newest}, which is committed on the drives" if newest == committed else str(sound)
        where = f"the newest that is saved, {point}, is from before that: the same command goes on from it"
    is_lost = run.engine.arrangement.integrity.cause is not None
    saves = "Nothing is saved from now on; " if is_lost else ""
    return HardwareError(f"{error}. {saves}{where}. Before, {_TEST}", since=error.since)
