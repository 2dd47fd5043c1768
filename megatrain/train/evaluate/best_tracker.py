"""The best evaluation of a run so far, and the number of evaluations since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run."""

    step: int
    loss: float | None
    name: str | None
    """The set that it is of."""


@dataclass(slots=True)
class BestTracker:
    """Counts evaluations; it is in every checkpoint, so that a resumed run stops where it would have."""

    evaluated_step: int | None = None
    """The newest step that was evaluated."""
    best_step: int | None = None
    best_loss: float | None = None
    best_set: str | None = None
    """The name of the set with that loss."""
    worse_in_a_row: int = 0
    """The number of evaluations since the best one."""
    has_stopped: bool = False
    """Whether the run has ended early."""

    def take(self, step: int, loss: float, name: str, *, min_delta: float) -> bool:
        """Record an evaluation's loss; return whether it is the best so far (infinity and nan never are)."""
        is_better = isfinite(loss) and (self.best_loss is None or loss < self.best_loss - min_delta)
        if is_better:
            self.best_step, self.best_loss, self.best_set = step, loss, name
            self.worse_in_a_row = 0
        else:
            self.worse_in_a_row += 1
        return is_better

    @property
    def best(self) -> Best | None:
        """The best evaluation so far, if there was one."""
        return None if self.best_step is None else Best(self.best_step, self.best_loss, self.best_set)

    def go_back(self, best: Best | None) -> None:
        """Take an earlier evaluation as the best one: no checkpoint has the weights of the later one."""
        self.best_step, self.best_loss, self.best_set = (
            (None, None, None) if best is None else (best.step, best.loss, best.name)
        )

    def state(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return asdict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; values of later versions are ignored."""
        for name in self.__slots__:
            if name in state:
                setattr(self, name, state[name])
        self.has_stopped = False

    def forget_best(self) -> None:
        """Forget the best evaluation, whose checkpoint belongs to another run."""
        self.go_back(None)
        self.worse_in_a_row = 0
