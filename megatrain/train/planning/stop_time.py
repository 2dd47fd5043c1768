"""The time that a run needs to stop once it is asked to: it finishes what it is at, and saves."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.config import Config
from megatrain.config.plan import Plan
from megatrain.plan.search.request import Request
from megatrain.train.planning.save_interval import is_behind, planned_facts, planned_save
from megatrain.train.records.metrics import format_duration

_MARGIN = 1.5
"""The time that a scheduler is told to leave, in times of the planned one: disks and steps may be slower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopTime:
    """The most that a plan foresees between the wish to stop and the end."""

    at_s: float
    """The seconds of the longest thing that is finished first: a step, an evaluation, or the checkpoint that
    is being written meanwhile."""
    save_s: float
    """The seconds of the last checkpoint."""

    @property
    def seconds(self) -> float:
        """Return the seconds of both."""
        return self.at_s + self.save_s

    @property
    def told_s(self) -> int:
        """Return how many seconds ahead a scheduler is to warn a run: whole minutes, with a margin."""
        return 60 * math.ceil(_MARGIN * self.seconds / 60)

    @property
    def most(self) -> str:
        """Return the seconds of both in words."""
        return format_duration(max(1.0, self.seconds))

    @property
    def text(self) -> str:
        """Return the figures in a few words."""
        parts = (
            f"{format_duration(self.at_s)} for what it is at and {format_duration(self.save_s)} for a save"
        )
        return f"within about {self.most}: {parts} (Slurm: --signal=USR1@{self.told_s})"

    def json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {**asdict(self), "seconds": self.seconds, "told_s": self.told_s}


def stop_time(config: Config, request: Request, plan: Plan, *, evaluation_s: float = 0.0) -> StopTime:
    """Return how long a run takes to stop, as planned.

    Args:
        config: The settings of the run.
        request: The request for its plan.
        plan: The plan.
        evaluation_s: The seconds of an evaluation; 0: there is none, or it is not known.
    """
    save_s = planned_save(**planned_facts(request, plan))
    may_save = config.checkpoint.every is not None and is_behind(config)
    return StopTime(at_s=max(plan.step_s, evaluation_s, save_s if may_save else 0.0), save_s=save_s)
