"""The micro-batches of one optimizer step, run together although Trainer asks for one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatrain.stream.activations.torch_state import RandomState
from megatrain.stream.engine import Engine
from megatrain.train.seeds import micro_batch_seed

T = TypeVar("T")

Step = Callable[[Any], Tensor]
"""A trainer's own training step on a batch, up to its backward: returns the loss to be logged."""


class StepGroup:
    """The batches that one optimizer step accumulates over, and their losses once they have run."""

    def __init__(self, batches: Sequence[Any]) -> None:
        """Expect that these are asked for, in order."""
        self._batches = list(batches)
        self._losses: list[Tensor] = []
        self._next = 0
        self.finished: list[int] = []
        """Numbers of the batches, as their calls have come to their ends."""

    def expects(self, batch: Any) -> bool:
        """Whether this is the batch that is to be asked for now."""
        return self._next < len(self._batches) and self._batches[self._next] is batch

    def take(self) -> Tensor:
        """Return the loss of the batch that is asked for now."""
        self._next += 1
        return self._losses[self._next - 1]

    @property
    def has_run(self) -> bool:
        """Whether the losses are there."""
        return bool(self._losses)

    def run(
        self, engine: Engine, accelerator: Any, step: Step, *, seed: int, number: int, only_loss: bool
    ) -> None:
        """Run all batches forward and backward through the engine.

        Each call is the trainer's own training step. Where it would call `accelerator.backward`, the engine
        takes the loss: nothing passes the model between that and the end of the call, so no other call is let
        through there.

        Args:
            engine: Of the model.
            accelerator: Whose `backward` the trainer's step calls.
            step: The trainer's.
            seed: Of the run.
            number: Of the optimizer step: with `seed`, it gives each batch a seed for its dropout, which is
                the same in any lockstep and after a resume.
            only_loss: As in `Engine.run_losses`.
        """
        taken: list[Tensor] = []
        logged: dict[int, Tensor] = {}

        def call(index: int) -> Tensor:
            logged[index] = step(self._batches[index])
            self.finished.append(index)
            return taken.pop()

        def backward(loss: Tensor, **_: Any) -> None:
            taken.append(loss / accelerator.gradient_accumulation_steps)

        calls = [_bound(call, index) for index in range(len(self._batches))]
        seeds = [micro_batch_seed(seed, number, index) for index in range(len(calls))]
        random = RandomState(engine.lanes.device)
        accelerator.backward = backward
        try:
            if (
                engine.arrangement.gradients.blocks
            ):  # an epoch without a length has ended in the middle of a step
                for call_now, own in zip(calls, seeds, strict=True):
                    torch.manual_seed(own)
                    call_now().backward()
            else:
                engine.run_losses(calls, seeds=seeds, only_loss=only_loss)
        finally:
            del accelerator.backward
            random.restore()
        self._losses = [logged[index] for index in range(len(calls))]

    def in_order(self, values: list[T]) -> list[T]:
        """Put in the order of the batches what their calls have appended to a list, each as many."""
        size, rest = divmod(len(values), len(self.finished))
        assert not rest, "the calls of a step have appended different numbers of values"
        parts = {
            index: values[place * size : (place + 1) * size] for place, index in enumerate(self.finished)
        }
        return [value for index in range(len(parts)) for value in parts[index]]


def _bound(call: Callable[[int], Tensor], index: int) -> Callable[[], Tensor]:
    return lambda: call(index)
