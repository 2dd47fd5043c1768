"""The traces that calls leave in a trainer: values in its lists of metrics, and counted tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNT, _COUNTED = "_total_train_tokens", "num_tokens"
"""TRL's number of tokens so far, and the metric that holds only this number."""


class Traces:
    """Records the traces of each call, so that they can be put in the order of the calls' numbers.

    A call leaves its traces at its end, where nothing of another call comes between.
    """

    def __init__(self, trainer: Any, mode: str = "train") -> None:
        """Begin before the first call; `mode` is TRL's name of the metrics: `train` or `eval`."""
        self._trainer = trainer
        self._metrics: dict[str, list[Any]] = getattr(trainer, "_metrics", {}).get(mode, {})
        self._first = self._last = self._lengths()
        self._first_count = self._last_count = getattr(trainer, COUNT, 0)
        self.left: dict[int, tuple[dict[str, list[Any]], int]] = {}
        """The values appended to lists and the number of counted tokens, by number of the call."""

    def note(self, number: int) -> None:
        """Record that the call of this number has come to its end."""
        now, count = self._lengths(), getattr(self._trainer, COUNT, 0)
        added = {
            name: list(values[self._last.get(name, 0) :])
            for name, values in self._metrics.items()
            if name != _COUNTED
        }
        self.left[number] = added, count - self._last_count
        self._last, self._last_count = now, count

    def undo(self) -> None:
        """Remove from the trainer the traces of calls so far, since these will be made again."""
        for name, values in self._metrics.items():
            del values[self._first.get(name, 0) :]
        if hasattr(self._trainer, COUNT):
            setattr(self._trainer, COUNT, self._first_count)
        self._last, self._last_count = self._first, self._first_count
        self.left.clear()

    def put(self, left: Mapping[int, tuple[Mapping[str, list[Any]], int]]) -> None:
        """Put the traces of calls, of this rank or of all, into the trainer in the order of their numbers."""
        names = [*self._metrics, *(name for added, _ in left.values() for name in added)]
        for name in dict.fromkeys(name for name in names if name != _COUNTED):
            values = self._metrics.setdefault(name, [])
            values[self._first.get(name, 0) :] = [
                value for number in sorted(left) for value in left[number][0].get(name, ())
            ]
        counted = sum(count for _, count in left.values())
        if counted:  # otherwise tokens are counted elsewhere
            count = self._first_count + counted
            setattr(self._trainer, COUNT, count)
            if _COUNTED in self._metrics:  # this list holds only the number
                self._metrics[_COUNTED] = [count]

    def _lengths(self) -> dict[str, int]:
        return {name: len(values) for name, values in self._metrics.items()}
