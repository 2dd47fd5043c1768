"""What calls of a trainer leave in it: values in its lists of metrics, and tokens that it has counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNT, _COUNTED = "_total_train_tokens", "num_tokens"
"""TRL's number of tokens so far, and the metric that holds it alone."""


class Traces:
    """Notes what each call has left, to put it in the order of the calls' numbers.

    What a call leaves, it leaves at its end, where nothing of another call comes between.
    """

    def __init__(self, trainer: Any, mode: str = "train") -> None:
        """Begin before the first call; `mode` is TRL's name of the metrics: `train` or `eval`."""
        self._trainer = trainer
        self._metrics: dict[str, list[Any]] = getattr(trainer, "_metrics", {}).get(mode, {})
        self._first = self._last = self._lengths()
        self._first_count = self._last_count = getattr(trainer, COUNT, 0)
        self.left: dict[int, tuple[dict[str, list[Any]], int]] = {}
        """By number of the call: what it has appended to lists, and how many tokens it has counted."""

    def note(self, number: int) -> None:
        """Take note that the call of this number has come to its end."""
        now, count = self._lengths(), getattr(self._trainer, COUNT, 0)
        added = {
            name: list(values[self._last.get(name, 0) :])
            for name, values in self._metrics.items()
            if name != _COUNTED
        }
        self.left[number] = added, count - self._last_count
        self._last, self._last_count = now, count

    def undo(self) -> None:
        """Take out of the trainer what calls have left so far: they will be made again."""
        for name, values in self._metrics.items():
            del values[self._first.get(name, 0) :]
        if hasattr(self._trainer, COUNT):
            setattr(self._trainer, COUNT, self._first_count)
        self._last, self._last_count = self._first, self._first_count
        self.left.clear()

    def put(self, left: Mapping[int, tuple[Mapping[str, list[Any]], int]]) -> None:
        """Leave what calls have left, of this rank or of all, in the order of their numbers."""
        names = [*self._metrics, *(name for added, _ in left.values() for name in added)]
        for name in dict.fromkeys(name for name in names if name != _COUNTED):
            values = self._metrics.setdefault(name, [])
            values[self._first.get(name, 0) :] = [
                value for number in sorted(left) for value in left[number][0].get(name, ())
            ]
        counted = sum(count for _, count in left.values())
        if counted:  # else somebody counts in another place
            count = self._first_count + counted
            setattr(self._trainer, COUNT, count)
            if _COUNTED in self._metrics:  # a list that holds the number alone
                self._metrics[_COUNTED] = [count]

    def _lengths(self) -> dict[str, int]:
        return {name: len(values) for name, values in self._metrics.items()}
