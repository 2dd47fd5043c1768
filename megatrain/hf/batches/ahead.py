"""Passes of a trainer without gradients, many batches together, so that each layer is fetched once for all.

The plain loops of an evaluation and of a reference take one batch after the other. Here their batches are
read a group ahead, the group passes the model together, and the loop then finds the result of each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from megatrain.checkpoint.rng import encode_rng, restore_rng
from megatrain.hf.batches.metric_traces import Traces
from megatrain.model.torch_state import RandomState
from megatrain.stream.engine import Engine
from megatrain.stream.forward.shared_state import SharedStateError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_RESULT_BYTES = 1 << 30
"""The size of the logits of a group, which wait on the host for their turn in the loop."""

Find = Callable[[Sequence[Any]], Sequence[Any]]
"""A function that returns the result of each batch of a group."""


class Turns:
    """Runs calls without gradients together, unless their side effects forbid it."""

    def __init__(self, engine: Engine, *, are_taken: bool = True) -> None:
        """Make a runner; `are_taken` says whether calls may run together as far as is known."""
        self._engine = engine
        self.are_taken = are_taken

    def run(self, calls: Sequence[Callable[[], T]], traces: Traces | None = None) -> list[T]:
        """Return the results of all calls, as if they ran one after the other.

        Calls that draw random numbers, or change the model's mode or adapters while it runs, are run again
        one after the other, and so is everything after them.

        Args:
            calls: The calls, each of which passes the model; `traces` is noted at the end of each.
            traces: The traces of the calls in the trainer.
        """
        if self.are_taken and len(calls) > 1:
            before = encode_rng()
            begin, device = RandomState(self._engine.lanes.device), self._engine.lanes.device
            has_drawn: list[bool] = []

            def watched(call: Callable[[], T]) -> Callable[[], T]:
                def run() -> T:
                    found = call()
                    has_drawn.append(not begin.is_same(RandomState(device)))
                    return found

                return run

            try:
                found = self._engine.together.run([watched(call) for call in calls])
                if not any(has_drawn) and encode_rng() == before:
                    return found
                why = "they draw random numbers"
            except SharedStateError:
                why = "they change the model's mode or adapters while it runs"
            _log.warning("batches without gradients pass the model one by one from now on: %s", why)
            self.are_taken = False
            restore_rng(before)
            if traces is not None:
                traces.undo()
        return [self._engine.together.run([call])[0] for call in calls]


class Ahead:
    """A loader whose batches are read a group ahead of the loop that asks for them."""

    def __init__(self, engine: Engine, loader: Any, find: Find, *, with_logits: bool = False) -> None:
        """Make a loader; nothing is read yet.

        Args:
            engine: The engine, which says how many batches fit together.
            loader: The loader of the loop, to which all other attributes are passed on.
            find: The function that is given the batches of a group before the loop has the first of them.
            with_logits: Whether logits wait on the host, which limits a group to as many as fit there.
        """
        self._engine, self._loader, self._find = engine, loader, find
        config = engine.model.config.get_text_config()
        self._least_tokens = 4 * getattr(config, "vocab_size", 1) if with_logits else 0
        self._found: Any = None

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def take(self, *_: Any, **__: Any) -> Any:
        """Return the result of the batch that the loop has now."""
        return self._found

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, while the loader says of each whether it is the last."""
        batches = self._read()
        for group in self._groups(batches):
            cut_nothing(self._loader)
            found = self._find([batch for batch, _ in group])
            for (batch, is_last), self._found in zip(group, found, strict=True):
                if is_last is not None:
                    self._loader.end_of_dataloader = is_last
                yield batch
        next(batches, None)  # the loader notes its end

    def _read(self) -> Iterator[tuple[Any, bool | None]]:
        for batch in self._loader:
            yield batch, getattr(self._loader, "end_of_dataloader", None)

    def _groups(self, batches: Iterator[tuple[Any, bool | None]]) -> Iterator[list[tuple[Any, bool | None]]]:
        most = _MOST_RESULT_BYTES // self._least_tokens if self._least_tokens else None

        def until_last() -> Iterator[tuple[Any, bool | None]]:
            for batch, is_last in batches:
                yield batch, is_last
                if is_last:  # reading further before the loop has had it would reset the loader's state
                    return

        for group in self._engine.together.groups(until_last(), lambda each: num_tokens(each[0])):
            yield from [group] if most is None else _limited(group, most)


def cut_nothing(loader: Any) -> None:
    """Make accelerate's `gather_for_metrics` return its argument, although the last batch is read already.

    Otherwise it would cut each batch of a group to the number of rows of the last one, which may be smaller.
    """
    if hasattr(loader, "end_of_dataloader"):
        loader.end_of_dataloader = False


def num_tokens(batch: Any) -> int:
    """Return the tokens of a trainer's batch, padding included; a batch without any passes alone."""
    values = batch.values() if isinstance(batch, Mapping) else ()
    sizes = [
        value.numel()
        for value in values
        if isinstance(value, Tensor) and not value.is_floating_point() and value.ndim > 1
    ]
    return max(sizes, default=1 << 62)


def _limited(group: Sequence[tuple[Any, T]], most: int) -> Iterator[list[tuple[Any, T]]]:
    """Cut a group into parts of no more than so many tokens."""
    part: list[tuple[Any, T]] = []
    total = 0
    for each in group:
        size = num_tokens(each[0])
        if part and total + size > most:
            yield part
            part, total = [], 0
        part.append(each)
        total += size
    yield part
