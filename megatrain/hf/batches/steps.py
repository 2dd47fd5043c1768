"""The micro-batches of one optimizer step, which run together although Trainer asks for them one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.distributed.alone import ALONE, Alone
from megatrain.errors import ConfigError
from megatrain.hf.batches.lengths import refuse_long
from megatrain.hf.batches.metric_traces import Traces
from megatrain.hf.ranks import ReadBatches
from megatrain.model.torch_state import RandomState
from megatrain.stream.engine import Engine
from megatrain.stream.steps import PassBefore
from megatrain.train.seeds import micro_batch_seed

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks

Parts = Callable[[int], list[list[int]]]
"""A function that returns the micro-batches of each rank, given their number; see `Engine.parts`."""

Step = Callable[[Any], Tensor]
"""A trainer's own training step on a batch, up to its backward; it returns the loss to be logged."""


class StepGroup:
    """The batches that one optimizer step accumulates over, and their losses once they have run."""

    def __init__(
        self,
        batches: Sequence[Any],
        num_runs: int = 1,
        ranks: Ranks | Alone = ALONE,
        parts: Parts | None = None,
    ) -> None:
        """Expect that these batches are asked for, in order.

        Args:
            batches: The batches of the whole step.
            num_runs: The number of runs into which the step is cut. If that does not come out even, at the
                end of an epoch, the last batch is run again as often as needed, and counts for nothing.
            ranks: The ranks, each of which runs its part of them.
            parts: The function that returns the parts, like `Engine.parts`.
        """
        self._batches = list(batches)
        self._ranks = ranks
        fill = -len(self._batches) % num_runs
        self._losses: list[Tensor] = []
        self._next = 0
        self.inputs = [*self._batches, *self._batches[-1:] * fill]
        """The inputs of the trainer's step: the batches, and the results of passes before it."""
        self.own: Sequence[int] = range(len(self.inputs))
        if parts is not None and self.inputs:
            self.own = parts(len(self.inputs))[ranks.rank]
        """The numbers of the batches that this rank runs."""

    def expects(self, batch: Any) -> bool:
        """Return whether this batch is the next one to be asked for."""
        return self._next < len(self._batches) and self._batches[self._next] is batch

    def take(self) -> Tensor:
        """Return the loss of the batch that is asked for now."""
        self._next += 1
        return self._losses[self._next - 1]

    @property
    def has_run(self) -> bool:
        """Return whether the losses are there."""
        return bool(self._losses)

    def run(
        self,
        trainer: Any,
        step: Step,
        *,
        only_loss: bool,
        before: Sequence[PassBefore] = (),
    ) -> None:
        """Run all batches forward and backward through the engine; with several ranks, each runs its own.

        Each call is the trainer's own training step. Where it would call `accelerator.backward`, the engine
        takes the loss: nothing passes the model between that and the end of the call, so no other call is let
        through there.

        Args:
            trainer: The trainer, with its engine and its accelerator, whose `backward` its step calls. The
                number of its optimizer step and its seed give each batch a seed of dropout, which is the same
                in any lockstep and after a resume.
            step: The training step of the trainer.
            only_loss: Whether only the loss is used, as in `Engine.run_losses`.
            before: The passes before the losses, as in `Engine.run_losses`, of this rank's batches; their
                calls put their results into `inputs`.

        Raises:
            ConfigError: The ranks have read different batches, a row is longer than the model takes, or hooks
                on gradients would see one twice.
        """
        engine: Engine = trainer.engine
        refuse_long(self._batches, engine.model)
        accelerator, number, traces = trainer.accelerator, trainer.state.global_step, Traces(trainer)
        hooked = engine.arrangement.binding.hooked
        if len(self.inputs) > len(self._batches) and hooked is not None:
            raise ConfigError(
                f"parameter {hooked} has a hook (register_hook), and step {number + 1}, of "
                f"{len(self._batches)} micro-batches, is filled up to {len(self.inputs)} for its shards, "
                "which the hook would see; use as many rows as make whole steps"
            )
        if self._ranks.size > 1:  # a digest of all that is read takes time
            ReadBatches(self._ranks, self._batches).require_same(number, trainer.state.max_steps)
        taken: list[Tensor] = []
        logged: dict[int, Tensor] = {}

        def call(index: int) -> Tensor:
            loss = step(self.inputs[index])
            if index < len(self._batches):
                logged[index] = loss
                traces.note(index)
                return taken.pop()
            traces.note(-1)
            return taken.pop() * 0.0

        def backward(loss: Tensor, **_: Any) -> None:
            taken.append(loss / accelerator.gradient_accumulation_steps)

        calls = [_bound(call, index) for index in self.own]
        seeds = [micro_batch_seed(trainer.args.seed, number, index) for index in self.own]
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
        traces.left.pop(-1, None)
        left = traces.left
        if self._ranks.size > 1:  # the losses of one rank stay where they are, and nobody waits for them
            device = engine.lanes.device
            mine = [[index, str(loss.dtype), float(loss), *left[index]] for index, loss in logged.items()]
            for found in self._ranks.gather_values(mine):
                for index, dtype, value, added, count in found:
                    kind = getattr(torch, dtype.removeprefix("torch."))
                    logged.setdefault(index, torch.tensor(value, dtype=kind, device=device))
                    left[index] = added, count
        self._losses = [logged[index] for index in range(len(self._batches))]
        traces.put(left)


def _bound(call: Callable[[int], Tensor], index: int) -> Callable[[], Tensor]:
    return lambda: call(index)
