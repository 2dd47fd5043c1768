"""Micro-batches in lockstep: all of a round pass a layer before any of them enters the next.

Each micro-batch is an ordinary forward of the model, run as a coroutine that gives way at every layer's
entry, and within a layer before each chunk of its experts, where they come apart. All run in one thread and
start in reverse order, so autograd's sequence numbers are block-major and backward, which takes the newest
first, passes each block with micro-batch 0, 1, 2, ... : gradients add up as they would if the micro-batches
came one after the other. Where the backward of each head follows its forward, they come to the head in their
own order, for the same reason.

Nothing of the model is cut or rewritten. What a coroutine must find again when it goes on is put away and
back: the parameters in place and the loss's token count by the `Keeper`, and what torch keeps per thread, the
random generators, the grad and autocast modes, and the hooks and modes that a layer is run in, here.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import overrides
from torch.utils import _python_dispatch as dispatch

from megatrain.model.torch_state import Autocast, RandomState

T = TypeVar("T")

_END = sys.maxsize, sys.maxsize
"""Where a call waits that has ended before those whose turn comes first."""


class Keeper(Protocol):
    """Puts away what belongs to the running micro-batch, and puts it back."""

    def put_away(self) -> object:
        """Take it out, and return it."""

    def put_back(self, kept: object) -> None:
        """Put it in place again."""


class Lockstep:
    """Runs calls as coroutines of the calling thread."""

    def __init__(self, keeper: Keeper, device: torch.device, num_layers: int) -> None:
        """Run passes through so many layers.

        Args:
            keeper: The keeper that puts away what belongs to the running micro-batch, and puts it back, at
                every change of coroutine.
            device: The device whose random generator is put back then, as the CPU's is.
            num_layers: The number of layers; the head comes behind them.
        """
        self._keeper = keeper
        self._device = device
        self._num_layers = num_layers
        self._hub: greenlet | None = None
        self._workers: list[greenlet] = []
        self._below: _Surroundings | None = None
        """The hooks and modes around the coroutines."""
        self._next_layer: dict[greenlet, tuple[int, float]] = {}
        """Before which layer a coroutine waits, after how many passes through all layers."""

    @property
    def is_running(self) -> bool:
        """Whether the caller is one of the coroutines."""
        return self._hub is not None and getcurrent() is not self._hub

    def give_way(self, layer: float) -> None:
        """Let the other micro-batches reach this layer; does nothing outside of a coroutine.

        A fraction is a place within the layer. The head comes behind the last layer, and a pass begins before
        the first: -1.

        Not in a backward: autograd's own thread cannot change coroutines, and its order is made by then.
        """
        if self._hub is None or not self.is_running or torch._C._current_graph_task_id() != -1:
            return
        turn, last = self._next_layer.get(getcurrent(), (0, -1))
        self._wait_at(turn + (layer <= last), layer)

    def wait_for_earlier(self) -> None:
        """Wait until the calls before this one have ended; does nothing outside of a coroutine."""
        if self.is_running and not all(worker.dead for worker in self._earlier(getcurrent())):
            self._wait_at(*_END)

    def _earlier(self, worker: greenlet) -> Sequence[greenlet]:
        return self._workers[: self._workers.index(worker)]

    def _wait_at(self, turn: int, layer: float) -> None:
        assert self._hub is not None
        self._next_layer[getcurrent()] = turn, layer
        kept = self._keeper.put_away()
        random, modes, surroundings = (
            RandomState(self._device),
            _Modes(self._device),
            _Surroundings(self._below),
        )
        try:
            self._hub.switch()
        finally:  # also where the others end this one: what it has entered is left in its own order
            surroundings.restore()
            modes.restore()
        random.restore()
        self._keeper.put_back(kept)

    def run(
        self, calls: Sequence[Callable[[], T]], *, heads_in_turn: bool = True, in_succession: bool = False
    ) -> list[T]:
        """Run all calls in lockstep and return their results, in the order of `calls`.

        Args:
            calls: The calls, one per micro-batch.
            heads_in_turn: A claim that calls come to the head in their own order; False: in that of the
                layers, since the backward begins when all have passed it.
            in_succession: A claim that each call runs to its end before the next one begins, the last one
                first.

        Raises:
            BaseException: A call raised it; the other calls are unwound first.
        """
        assert self._hub is None, "micro-batches in lockstep do not run micro-batches in lockstep"
        results: dict[int, T] = {}
        ends: dict[int, RandomState] = {}
        begin, modes = RandomState(self._device), _Modes(self._device)
        self._below = _Surroundings()
        self._below.restore()

        def coroutine(number: int) -> Callable[[], None]:
            def run() -> None:
                modes.restore()
                begin.restore()
                results[number] = calls[number]()
                ends[number] = RandomState(self._device)

            return run

        self._hub = getcurrent()
        workers = self._workers = [greenlet(coroutine(number)) for number in range(len(calls))]
        try:
            for worker in workers:
                worker.gr_context = contextvars.copy_context()
            while alive := [worker for worker in workers if not worker.dead]:
                if in_succession:
                    alive[-1].switch()
                    continue
                # A model may skip a layer (layer drop): who is ahead waits for the others.
                places = {worker: self._next_layer.get(worker, (0, -1)) for worker in alive}
                place = min(places.values())
                here = [worker for worker in alive if places[worker] == place]
                is_in_turn = heads_in_turn and place[1] >= self._num_layers
                for worker in here if is_in_turn else reversed(here):
                    worker.switch()
        finally:
            try:
                for worker in workers:
                    if not worker.dead:
                        worker.throw(GreenletExit)
            finally:
                modes.restore()
                self._next_layer.clear()
                self._hub, self._workers = None, []
        ends[len(calls) - 1].restore()
        return [results[number] for number in range(len(calls))]


class _Modes:
    """The grad and autocast modes. They are a thread's, not a coroutine's, and models change them inside."""

    def __init__(self, device: torch.device) -> None:
        self._has_grad = torch.is_grad_enabled()
        self._autocast = Autocast(device)

    def restore(self) -> None:
        """Set the thread's modes to these."""
        if torch.is_grad_enabled() is not self._has_grad:
            torch.set_grad_enabled(self._has_grad)
        self._autocast.restore()


class _Surroundings:
    """The hooks for saved tensors and the modes that a coroutine has entered, which are a thread's too."""

    def __init__(self, below: _Surroundings | None = None) -> None:
        """Take them out, but for those that were there `below`, before the coroutine began."""
        self._hooks = _taken_hooks()
        self._dispatch = [dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
        self._functions = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
        if below is not None:
            below.restore()
            for own, held in zip(self._stacks, below._stacks, strict=True):
                del own[len(own) - len(held) :]

    @property
    def _stacks(self) -> tuple[list[Any], ...]:
        return self._hooks, self._dispatch, self._functions

    def restore(self) -> None:
        """Put them back."""
        for mode in reversed(self._functions):
            overrides._push_mode(mode)
        for mode in reversed(self._dispatch):
            dispatch._push_mode(mode)
        for pack, unpack in reversed(self._hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _taken_hooks() -> list[Any]:
    """Take all hooks for saved tensors out, the innermost first."""
    found = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return found
