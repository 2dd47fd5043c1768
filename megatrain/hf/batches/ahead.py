"""A trainer's passes without gradients, many batches together: each layer is fetched once for all of them.

The plain loops of an evaluation and of a reference take one batch after the other. Here their batches are
read a group ahead, the group passes the model together, and the loop then finds what came of each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from megatrain.checkpoint.rng import encode_rng, restore_rng
from megatrain.hf.batches.traces import Traces
from megatrain.stream.activations.torch_state import RandomState
from megatrain.stream.engine import Engine
from megatrain.stream.forward.shared_state import SharedStateError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_RESULT_BYTES = 1 << 30
"""Of the logits of a group, which wait on the host for their turn in the loop."""

Find = Callable[[Sequence[Any]], Sequence[Any]]
"""Returns what came of each batch of a group."""


class Turns:
    """Runs calls without gradients together, unless what they do does not allow it."""

    def __init__(self, engine: Engine, *, are_taken: bool = True) -> None:
        """Begin; `are_taken`: nothing is known to stand against it."""
        self._engine = engine
        self.are_taken = are_taken

    def run(self, calls: Sequence[Callable[[], T]], traces: Traces | None = None) -> list[T]:
        """Return the results of all calls, as if they ran one after the other.

        Calls that draw random numbers, or change the model's mode or adapters while it runs, are run again
        one after the other, and so is everything after them.

        Args:
            calls: Each passes the model; `traces` takes note at the end of each.
            traces: Of the calls in the trainer.
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
        """Read nothing yet.

        Args:
            engine: Says how many batches fit together.
            loader: Of the loop; everything else that is asked of it is its own.
            find: Is given the batches of a group before the loop has the first of them.
            with_logits: They wait on the host, so a group has no more than there should be of them.
        """
        self._engine, self._loader, self._find = engine, loader, find
        config = engine.model.config.get_text_config()
        self._least_tokens = 4 * getattr(config, "vocab_size", 1) if with_logits else 0
        self._found: Any = None

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def take(self) -> Any:
        """Return what came of the batch that the loop has now."""
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
        next(batches, None)  # the loader takes note of its end

    def _read(self) -> Iterator[tuple[Any, bool | None]]:
        for batch in self._loader:
            yield batch, getattr(self._loader, "end_of_dataloader", None)

    def _groups(self, batches: Iterator[tuple[Any, bool | None]]) -> Iterator[list[tuple[Any, bool | None]]]:
        most = _MOST_RESULT_BYTES // self._least_tokens if self._least_tokens else None

        def until_last() -> Iterator[tuple[Any, bool | None]]:
            for batch, is_last in batches:
                yield batch, is_last
                if is_last:  # whoever reads on before the loop has had it takes the loader's state away
                    return

        for group in self._engine.together.groups(until_last(), lambda each: num_tokens(each[0])):
            yield from [group] if most is None else _limited(group, most)


def cut_nothing(loader: Any) -> None:
    """Let `gather_for_metrics` of accelerate return what it is given, though the last batch is read already.

    It would cut what each batch of a group has to the rows of the last one, which has no more than these.
    """
    if hasattr(loader, "end_of_dataloader"):
        loader.end_of_dataloader = False


@contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let a method of an object be another one for a while."""
    nothing = object()
    before = vars(owner).get(name, nothing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not nothing:
            setattr(owner, name, before)


def num_tokens(batch: Any) -> int:
    """Return how many tokens a batch of a trainer has, padding included; without any it passes alone."""
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
