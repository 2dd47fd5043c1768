"""Calls without gradients that pass the model together: each layer is fetched once for all that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from megatrain.config.choice import StepBatch
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.steps import Steps

T = TypeVar("T")

_MOST = 256
"""Calls of a group: each is a coroutine with a stack of its own."""


class Together:
    """Runs such calls through one engine, and knows how many there is room for."""

    def __init__(self, steps: Steps, arrangement: Arrangement, check: Callable[[], None]) -> None:
        """Know nothing yet of the steps that memory was planned for; `check` raises if nothing can run."""
        self._steps, self._arrangement, self._check = steps, arrangement, check
        self.micro_batch_tokens: int | None = None
        """Of a step's micro-batches, padding included; None: not known."""
        self.planned_tokens = 0
        """That a plan lets pass together under the choice in force; 0: there is no plan."""

    def take_room(self, batch: StepBatch | None, planned_tokens: int) -> None:
        """Take note of the steps that memory was planned for, and of what the plan says."""
        if batch is not None:
            self.micro_batch_tokens = batch.micro_batch_size * batch.seq_len // batch.sequence
        self.planned_tokens = planned_tokens

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Run calls that pass the model without gradients, between two steps.

        Each result has the bits of a call by itself. What calls hold of their batches is on the device at the
        same time; `fit` says how many may be.

        Args:
            calls: The calls, each of which passes the model once or several times, and returns what it likes.
                They take turns at every layer, so none may change the model's mode or adapters within. All
                begin with the same random state.

        Returns:
            What they have returned, in order.

        Raises:
            ConfigError: A step is going on, or a call has changed the model's mode or adapters.
        """
        self._check()
        return self._steps.run_passes(calls)

    def fit(self, num_tokens: Sequence[int]) -> bool:
        """Whether batches of so many tokens, padding included, may pass together.

        That is as many as the plan has found room for in the memory of a step, and always those of a round;
        one alone where what a row computes depends on the rows before it.
        """
        if self._steps.takes_order and len(num_tokens) > 1:
            return False
        lockstep = self._arrangement.choice.lockstep
        if self.micro_batch_tokens is None and not self.planned_tokens:
            return len(num_tokens) <= lockstep
        return sum(num_tokens) <= max(lockstep * (self.micro_batch_tokens or 0), self.planned_tokens)

    def groups(self, batches: Iterable[T], num_tokens: Callable[[T], int]) -> Iterator[list[T]]:
        """Yield batches in groups that fit, in their order; one that is large is alone.

        Args:
            batches: The batches, of which one more is read than a group has, to know that it does not fit.
            num_tokens: The function that says of a batch how many tokens it has, padding included.
        """
        group: list[T] = []
        sizes: list[int] = []
        for batch in batches:
            size = num_tokens(batch)
            if group and (len(group) == _MOST or not self.fit([*sizes, size])):
                yield group
                group, sizes = [], []
            group.append(batch)
            sizes.append(size)
        if group:
            yield group
