"""The micro-batches of one optimizer step, run together although Trainer asks for one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatrain.stream.activations.torch_state import RandomState
from megatrain.stream.engine import Engine
from megatrain.stream.steps import PassBefore
from megatrain.train.seeds import micro_batch_seed

Step = Callable[[Any], Tensor]
"""A trainer's own training step on a batch, up to its backward: returns the loss to be logged."""


class StepGroup:
    """The batches that one optimizer step accumulates over, and their losses once they have run."""

    def __init__(self, batches: Sequence[Any]) -> None:
        """Expect that these are asked for, in order."""
        self._batches = list(batches)
        self._losses: list[Tensor] = []
        self._next = 0
        self.inputs = list(batches)
        """What the trainer's step is called with: the batches, and what passes before it have found."""

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
        self,
        engine: Engine,
        accelerator: Any,
        step: Step,
        *,
        seed: int,
        number: int,
        only_loss: bool,
        before: Sequence[PassBefore] = (),
        metrics: Mapping[str, list[Any]] | None = None,
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
            before: As in `Engine.run_losses`; their calls put what they find into `inputs`.
            metrics: Lists to which the step appends, which will be in the order of the batches: the trainer
                adds them up in theirs.
        """
        taken: list[Tensor] = []
        logged: dict[int, Tensor] = {}
        metrics = {} if metrics is None else metrics
        lengths = [_lengths(metrics)]

        def call(index: int) -> Tensor:
            logged[index] = step(self.inputs[index])
            lengths.append(_lengths(metrics))
            return taken.pop()

        def backward(loss: Tensor, **_: Any) -> None:
            taken.append(loss / accelerator.gradient_accumulation_steps)

        calls = [_bound(call, index) for index in range(len(self._batches))]
        seeds = [micro_batch_seed(seed, number, index) for index in range(len(calls))]
        random = RandomState(engine.lanes.device)
        accelerator.backward = backward
        try:
            if engine.arrangement.gradients.blocks:
                # an epoch without a length has ended in the middle of a step
                for each in before:
                    with each.around(), torch.no_grad():
                        for call_before in each.calls:
                            call_before()
                for call_now, own in zip(calls, seeds, strict=True):
                    torch.manual_seed(own)
                    call_now().backward()
            else:
                engine.run_losses(calls, seeds=seeds, only_loss=only_loss, before=before)
        finally:
            del accelerator.backward
            random.restore()
        self._losses = [logged[index] for index in range(len(calls))]
        _put_in_order(metrics, lengths, list(logged))


def _bound(call: Callable[[int], Tensor], index: int) -> Callable[[], Tensor]:
    return lambda: call(index)


def _lengths(metrics: Mapping[str, list[Any]]) -> dict[str, int]:
    return {name: len(values) for name, values in metrics.items()}


def _put_in_order(
    metrics: Mapping[str, list[Any]], lengths: Sequence[Mapping[str, int]], finished: Sequence[int]
) -> None:
    """Put in the order of the batches what calls have appended to lists.

    What a call appends, it appends at its end, where nothing of another call comes between. A list that holds
    one number, which counts on, has not grown, and stays as it is.

    Args:
        metrics: The lists, by name.
        lengths: How long they were before the calls, and as each call came to its end.
        finished: The numbers of the batches in that order.
    """
    for name, values in metrics.items():
        ends = [known.get(name, 0) for known in lengths]
        parts = {number: values[ends[n] : ends[n + 1]] for n, number in enumerate(finished)}
        values[ends[0] :] = [value for number in sorted(parts) for value in parts[number]] or values[
            ends[0] :
        ]
