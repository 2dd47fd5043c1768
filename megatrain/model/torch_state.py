"""What torch keeps for a thread and a model computes by, to have it again: random generators, autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatrain.hardware.accelerators import random_state, set_random_state

_cpu_state = torch.default_generator.get_state
_set_cpu_state = torch.default_generator.set_state


class RandomState:
    """The state of the generators from which a model draws, to draw the same again."""

    def __init__(self, device: torch.device) -> None:
        """Take the state of the CPU's generator and of `device`'s."""
        self._device = device
        self._cpu = _cpu_state()
        self._own = None if device.type == "cpu" else random_state(device)

    def is_same(self, other: RandomState) -> bool:
        """Whether nothing was drawn in between."""
        if self._own is not None and other._own is not None and not torch.equal(self._own, other._own):
            return False
        return torch.equal(self._cpu, other._cpu)

    def restore(self) -> None:
        """Set the generators to this state."""
        _set_cpu_state(self._cpu)
        if self._own is not None:
            set_random_state(self._device, self._own)


class Autocast:
    """The autocast state of a thread."""

    def __init__(self, device: torch.device) -> None:
        """Take the state for the CPU and for `device`."""
        self._kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self._is_enabled = [*map(torch.is_autocast_enabled, self._kinds)]
        self._dtypes = [*map(torch.get_autocast_dtype, self._kinds)]
        self._cache = torch.is_autocast_cache_enabled()

    def restore(self) -> None:
        """Set the thread's state to this one."""
        for kind, is_enabled, dtype in zip(self._kinds, self._is_enabled, self._dtypes, strict=True):
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)

    def again(self) -> AbstractContextManager[object]:
        """Return a context with this state; casts that it keeps are dropped when it is left."""
        if True not in self._is_enabled and True not in map(torch.is_autocast_enabled, self._kinds):
            return nullcontext()
        stack = ExitStack()
        for kind, is_enabled, dtype in zip(self._kinds, self._is_enabled, self._dtypes, strict=True):
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=self._cache)
            )
        return stack


@contextmanager
def casting_anew() -> Iterator[None]:
    """Let autocast keep no cast of a weight: what runs without a graph would leave it to what runs with one.

    Such a cast has no node, so that the weight would get no gradient; and it would stay on the device for as
    long as the caller's autocast lasts.
    """
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)


def saving_nothing() -> AbstractContextManager[object]:
    """Let autograd make a graph that nobody goes back through: what it saves is dropped."""
    return saved_tensors_hooks(lambda _: _NOTHING, lambda _: _NOTHING)


_NOTHING = torch.empty(0)
