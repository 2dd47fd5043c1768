"""Where a run stands among its evaluations: the best so far, and how long ago that was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any


@dataclass(slots=True)
class Standing:
    """Counts evaluations; it is in every checkpoint, so that a resumed run stops where it would have."""

    evaluated_step: int | None = None
    """The newest step that was evaluated."""
    best_step: int | None = None
    best_loss: float | None = None
    best_set: str | None = None
    """Name of the set whose loss that is."""
    worse_in_a_row: int = 0
    """Evaluations since the best one."""
    has_stopped: bool = False
    """The run has ended early."""

    def take(self, step: int, loss: float, name: str, *, min_delta: float) -> bool:
        """Take an evaluation's loss in; returns whether it is the best so far: infinity and nan never are."""
        is_better = isfinite(loss) and (self.best_loss is None or loss < self.best_loss - min_delta)
        if is_better:
            self.best_step, self.best_loss, self.best_set = step, loss, name
            self.worse_in_a_row = 0
        else:
            self.worse_in_a_row += 1
        return is_better

    def state(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as `state` was; values of later versions are left alone."""
        for name in self.__slots__:
            if name in state:
                setattr(self, name, state[name])
        self.has_stopped = False

    def forget_best(self) -> None:
        """Begin anew: the best checkpoint is of another run."""
        self.best_step = self.best_loss = self.best_set = None
        self.worse_in_a_row = 0
