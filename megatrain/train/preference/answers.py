"""Steps and evaluations of a run, by the model's own loss or by the loss of judged answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.config import Config
from megatrain.config.runs import in_order
from megatrain.data.pairs import SIDES
from megatrain.distributed.alone import ALONE, Alone
from megatrain.model.shares import IGNORED
from megatrain.objective.objective import Answers, Objective, Settings, Shown
from megatrain.stream.engine import Engine
from megatrain.stream.evaluate import ids_of, row_losses
from megatrain.train.evaluate.losses import Measure
from megatrain.train.evaluate.tally import Tally, as_values

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks

_OF_MODEL = ("input_ids", "labels")


class ModelLoss:
    """The loss that the model itself computes over the tokens of a whole step."""

    measure: Measure | None = None
    """The measure of evaluations, which are by the model's own loss too."""

    def forward_backward(
        self,
        engine: Engine,
        micro_batches: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        ranks: Ranks | Alone = ALONE,
    ) -> tuple[Tensor, dict[str, float]]:
        """Run this rank's part of a step forward and backward, as `AnswerLoss.forward_backward` does."""
        own = engine.parts(len(micro_batches))[ranks.rank]
        mine = [micro_batches[number] for number in own]
        return engine.forward_backward(mine, seeds=[seeds[number] for number in own]), {}


class AnswerLoss:
    """The loss of a run that learns from judged answers."""

    def __init__(self, objective: Objective, settings: Settings) -> None:
        """Store the objective that computes the loss of a row, and the settings that it reads."""
        self._objective, self._settings = objective, settings

    def forward_backward(
        self,
        engine: Engine,
        micro_batches: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        ranks: Ranks | Alone = ALONE,
    ) -> tuple[Tensor, dict[str, float]]:
        """Run a step's micro-batches forward and backward; see `Engine.run_losses`.

        Args:
            engine: The engine of the model.
            micro_batches: The micro-batches of the whole step.
            seeds: The seed of each micro-batch.
            ranks: The ranks that share them out.

        Returns:
            The loss, averaged over all rows of the step, and the means of the other values, by name.
        """
        total = sum(len(batch["reference"]) for batch in micro_batches)
        shown: dict[int, Shown] = {}

        def loss_of(number: int) -> Callable[[], Tensor]:
            def loss() -> Tensor:
                losses, shown[number] = self._losses(engine, micro_batches[number])
                return losses.sum() / total

            return loss

        shared_out = engine.parts(len(micro_batches))
        numbers = shared_out[ranks.rank]
        own_seeds = [seeds[number] for number in numbers]
        parts = engine.run_losses([loss_of(number) for number in numbers], seeds=own_seeds)
        seen = [shown[number] for number in numbers]  # these are in order, whatever the order of their passes
        if ranks.size > 1:  # the values of one rank stay on the device, and nobody waits for them
            parts = in_order(shared_out, [list(each) for each in ranks.gather(torch.stack(parts))])
            values = in_order(shared_out, ranks.gather_values([*map(as_values, seen)]))
            seen = [{name: torch.tensor(some) for name, some in each.items()} for each in values]
        tally = Tally()
        for each in seen:
            tally.add(each)
        return reduce(torch.add, parts), tally.means()

    def measure(self, engine: Engine, batches: Iterable[Mapping[str, Any]]) -> Iterator[Shown]:
        """Yield the values of each batch's rows; the caller sets the mode of the model."""
        for group in engine.together.groups(batches, ids_of):
            for losses, shown in engine.together.run(
                [partial(self._losses, engine, batch) for batch in group]
            ):
                yield {"loss": losses, **shown}

    def _losses(self, engine: Engine, batch: Mapping[str, Any]) -> tuple[Tensor, Shown]:
        found = -row_losses(engine, {name: batch[name] for name in _OF_MODEL}).view(-1, SIDES)
        answers = Answers(
            found,
            (batch["labels"] != IGNORED).sum(-1).view(-1, SIDES).to(found.device),
            batch["reference"].to(found.device),
            batch["is_good"].to(found.device),
        )
        return self._objective.losses(self._settings, answers)


def loss_of(config: Config) -> ModelLoss | AnswerLoss:
    """Return the object that computes the loss of a run."""
    is_judged = config.objective.rows.is_judged
    return AnswerLoss(config.objective, config.preference) if is_judged else ModelLoss()
