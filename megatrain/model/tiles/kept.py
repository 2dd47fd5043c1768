"""What calls in tiles keep from their layer's first run for its second one, and for their backward.

A layer that runs again has a store in use. What attention returns goes there from the first run on, and its
backward reads it from there: the second run neither computes it nor hands it on. The layer's own input comes
from there too. What waits on the host, or on drives, is read a tile at a time, or a group of heads at a time,
and is on the device for no longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Stored(Protocol):
    """A tensor, wherever it waits."""

    @property
    def shape(self) -> torch.Size:
        """Its shape: (rows, tokens, ...) where `rows` is asked."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    def load(self) -> Tensor:
        """Return it on the device."""

    def rows(self, tile: slice) -> Tensor:
        """Return some tokens of it on the device; tiles are asked for in order."""


@dataclass(slots=True)
class Whole:
    """A tensor that stays where it is."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.tensor.dtype

    def load(self) -> Tensor:
        """Return it."""
        return self.tensor

    def rows(self, tile: slice) -> Tensor:
        """Return some tokens of it."""
        return self.tensor[:, tile]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is in memory: how it is known again without being held."""

    storage: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        """Return the place of a tensor."""
        storage = tensor.untyped_storage()._cdata
        return cls(storage, int(tensor.storage_offset()), tensor.shape, tensor.stride())


class Store:
    """What one call of a layer keeps."""

    def __init__(
        self,
        *,
        keeps_attention: bool,
        save: Callable[[Tensor], Stored] = Whole,
        leave: Callable[[], object] = lambda: None,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """Keep nothing yet.

        Args:
            keeps_attention: Whether what attention returns is kept; else a second run computes it again.
            save: The function that keeps a tensor.
            leave: The function that is called once what attention returned is kept: it may leave the device.
            settle: The function that is called after the call in tiles that comes next: it may be gone.
        """
        self.keeps_attention = keeps_attention
        self.save, self._leave, self._settle = save, leave, settle
        self.num_kept = 0
        """The calls of attention in the first run whose results are kept."""
        self.is_again = False
        """Whether what runs has run before."""
        self._kept: dict[Hashable, list[Any]] = {}
        self._waiting: dict[Hashable, deque[Any]] = {}
        self._input: tuple[_Place, Stored] | None = None
        self._calls_since = -1
        """Calls in tiles that have ended since attention's results were kept; -1: there are none to leave."""

    @contextmanager
    def running(self, *, is_last: bool = False) -> Iterator[None]:
        """Have this store in use while the layer runs, for the first time or once more.

        Args:
            is_last: Whether it does not run again, so that nothing is kept after it.
        """
        self._waiting = {key: deque(calls) for key, calls in self._kept.items()}
        _in_use.append(self)
        try:
            yield
        finally:
            _in_use.pop()
            self.is_again = True
            self._input = None
            self._waiting.clear()
            if is_last:
                self._kept.clear()

    def has_input(self, hidden: Tensor, stored: Stored) -> None:
        """Say what the layer's input is in the run that comes next, and where its backward finds it."""
        self._input = _Place.of(hidden), stored

    def source(self, hidden: Tensor) -> Stored | None:
        """Return what the layer's input is read from in the backward; None: `hidden` is something else."""
        if self._input is None or self._input[0] != _Place.of(hidden):
            return None
        return self._input[1]

    def keep(self, key: Hashable, call: Any) -> None:
        """Keep what a call of attention leaves for the runs that follow; None: it leaves nothing."""
        self._kept.setdefault(key, []).append(call)
        if call is None:
            return
        self.num_kept += 1
        if self._calls_since < 0:
            self._calls_since = 0
            self._leave()

    def again(self, key: Hashable) -> Any:
        """Return what the same call has left in the first run."""
        return self._waiting[key].popleft()

    def passed(self) -> None:
        """Take note that a call in tiles has ended."""
        if self.is_again or self._calls_since < 0:
            return
        self._calls_since += 1
        if self._calls_since == 2:  # the first one is that of attention
            self._settle()


_in_use: list[Store] = []


def store_in_use() -> Store | None:
    """Return the store of the layer that runs; None: it runs once."""
    return _in_use[-1] if _in_use else None
