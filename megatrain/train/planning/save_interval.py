"""When a run saves: at steps, after a time, or as often as costs little."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatrain.config import Config
from megatrain.config.plan import Plan
from megatrain.config.types import seconds_between, steps_between
from megatrain.plan.cost.saved_bytes import checkpoint_bytes
from megatrain.plan.search.request import Request

LEAST_S = 600.0
"""Seconds between checkpoints of `auto`, at least."""
COST_SHARE = 0.02
"""The share of a run's time that checkpoints of `auto` may take."""

COMMON_RATE = 1e9
"""Bytes per second that a plan takes a disk to write of which nothing is known."""


def is_timed(every: int | str | None) -> bool:
    """Return whether a value of `checkpoint.every` is a time, or `auto`, which is one."""
    return every == "auto" or seconds_between(every) is not None


def is_behind(config: Config) -> bool:
    """Return whether a run goes on training while a checkpoint is written.

    Several nodes do that where they share the run's directory, which is tried when they train.
    """
    return config.checkpoint.background


def planned_facts(request: Request, plan: Plan) -> dict[str, Any]:
    """Return the arguments of `planned_save` and `planned_wait` that a plan tells.

    Args:
        request: The request for the plan.
        plan: The plan.
    """
    drives = request.spec.drives
    nbytes = checkpoint_bytes(request.anatomy, request.optimizer)
    return {
        "nbytes": nbytes,
        "away_bytes": min(nbytes, plan.tier_bytes("nvme") // 2),  # there are two copies there
        "write_bytes_per_s": COMMON_RATE if drives is None else drives.write_bytes_per_s,
        "read_bytes_per_s": COMMON_RATE if drives is None else drives.read_bytes_per_s,
    }


def least_interval(cost_s: float, wear_s: float = 0.0) -> float:
    """Return the seconds between checkpoints of `auto`.

    Args:
        cost_s: The seconds by which one makes the run longer.
        wear_s: The seconds between them with which the drive outlives the run, as by `wear_interval`.
    """
    return max(LEAST_S, cost_s / COST_SHARE, wear_s)


def wear_interval(
    plan: Plan, *, nbytes: int, num_steps: int | None, rated_bytes: float | None, written_bytes: float = 0.0
) -> float:
    """Return the seconds between checkpoints with which drives have endurance left at the end of a run.

    0: that is not known, or the state on these drives uses it up by itself (`memory.accept_wear`).

    Args:
        plan: The plan of the run.
        nbytes: The bytes of a checkpoint.
        num_steps: The number of steps that are still to be taken; None: not known.
        rated_bytes: The rated endurance of the drives; None: not known.
        written_bytes: The bytes that the run has written to them so far.
    """
    if rated_bytes is None or not num_steps:
        return 0.0
    left = rated_bytes - written_bytes - plan.drive_written_bytes * num_steps
    return num_steps * plan.step_s * nbytes / left if left > nbytes else 0.0


def planned_save(*, nbytes: int, away_bytes: int, write_bytes_per_s: float, read_bytes_per_s: float) -> float:
    """Return the seconds from the begin of a checkpoint until it is whole; arguments as of `planned_wait`."""
    away_s = away_bytes / min(write_bytes_per_s, read_bytes_per_s)
    return away_s + (nbytes - away_bytes) / write_bytes_per_s


def planned_wait(
    *, step_s: float, nbytes: int, away_bytes: int, write_bytes_per_s: float, read_bytes_per_s: float
) -> float:
    """Return the seconds for which a plan foresees a run to wait for a checkpoint in the background.

    What is on drives is read before the next step, no faster than it is written. Of the rest, what the disk
    takes longer than a step is waited for, and a tenth of a step beside it.

    Args:
        step_s: The seconds of a step.
        nbytes: The bytes of a checkpoint.
        away_bytes: The bytes of it that are on drives.
        write_bytes_per_s: The rate at which the disk writes.
        read_bytes_per_s: The rate at which the drives are read.
    """
    away_s = away_bytes / min(write_bytes_per_s, read_bytes_per_s)
    late_s = (nbytes - away_bytes) / write_bytes_per_s - step_s
    return away_s + max(0.0, late_s) + 0.1 * step_s


def planned_interval(
    every: int | str | None, steps_per_epoch: int, *, step_s: float, wait_s: float, wear_s: float = 0.0
) -> float | None:
    """Return the seconds between checkpoints that a plan foresees; None: there is one at the end only.

    Args:
        every: The setting `checkpoint.every`.
        steps_per_epoch: The number of steps of one pass over the data.
        step_s: The seconds of a step.
        wait_s: The seconds for which the run waits for one, as by `planned_wait`.
        wear_s: The seconds between them with which drives last, as by `wear_interval`.
    """
    if every == "auto":
        return max(least_interval(wait_s, wear_s), step_s)
    seconds = seconds_between(every)
    if seconds is not None:
        return max(seconds, step_s)
    steps = steps_between(every, steps_per_epoch)
    return None if steps is None else steps * step_s


class SaveInterval:
    """Says after which steps a run saves."""

    def __init__(
        self,
        every: int | str | None,
        steps_per_epoch: int,
        *,
        wear_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            every: The setting `checkpoint.every`.
            steps_per_epoch: The number of steps of one pass over the data.
            wear_s: The seconds between checkpoints of `auto` with which drives last, as by `wear_interval`.
            clock: The clock in seconds, for tests.
        """
        self._clock, self._wear_s = clock, wear_s
        self.is_auto = every == "auto"
        self._seconds = least_interval(0.0, wear_s) if self.is_auto else seconds_between(every)
        self._steps = None if is_timed(every) else steps_between(every, steps_per_epoch)
        self._since = clock()

    @property
    def is_timed(self) -> bool:
        """Whether it is a time, which passes otherwise on every rank."""
        return self._seconds is not None

    def is_due(self, step: int) -> bool:
        """Return whether the state after a step is to be saved; ranks ask the first one's."""
        if self._seconds is not None:
            return self._clock() - self._since >= self._seconds
        return self._steps is not None and step % self._steps == 0

    def begun(self) -> None:
        """Take note that a checkpoint is begun."""
        self._since = self._clock()

    def took(self, cost_s: float) -> None:
        """Take note by how many seconds it has made the run longer."""
        if self.is_auto:
            self._seconds = least_interval(cost_s, self._wear_s)
