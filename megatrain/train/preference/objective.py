"""Steps and evaluations of a run that learns from judged answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from megatrain.config.runs import in_order
from megatrain.config.sections.preference import PreferenceConfig
from megatrain.distributed.ranks import Ranks
from megatrain.stream.engine import Engine
from megatrain.stream.evaluate import ids_of, row_losses
from megatrain.train.evaluate.losses import Evaluation
from megatrain.train.preference.losses import Shown, Tally, losses_of

_OF_MODEL = ("input_ids", "labels")


class Preference:
    """The loss of a run."""

    def __init__(self, settings: PreferenceConfig) -> None:
        """Take the settings of the loss."""
        self._settings = settings

    def forward_backward(
        self,
        engine: Engine,
        micro_batches: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        ranks: Ranks | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Run a step's micro-batches forward and backward; see `Engine.run_losses`.

        Args:
            engine: Of the model.
            micro_batches: Of the whole step.
            seeds: One for each.
            ranks: That share them out; None: there is one.

        Returns:
            The loss, averaged over all rows of the step, and means of what was seen, by name.
        """
        total = sum(len(batch["reference"]) for batch in micro_batches)
        shown: dict[int, Shown] = {}

        def loss_of(number: int) -> Callable[[], Tensor]:
            def loss() -> Tensor:
                losses, shown[number] = self._losses(engine, micro_batches[number])
                return losses.sum() / total

            return loss

        shared_out = engine.parts(len(micro_batches))
        numbers = shared_out[0 if ranks is None else ranks.rank]
        own_seeds = [seeds[number] for number in numbers]
        parts = engine.run_losses([loss_of(number) for number in numbers], seeds=own_seeds)
        seen = [shown[number] for number in numbers]  # in order, whatever the turns they took
        if ranks is not None:
            parts = in_order(shared_out, [list(each) for each in ranks.gather(torch.stack(parts))])
            values = [{name: some.tolist() for name, some in each.items()} for each in seen]
            seen = [
                {name: torch.tensor(some) for name, some in each.items()}
                for each in in_order(shared_out, ranks.gather_values(values))
            ]
        tally = Tally()
        for each in seen:
            tally.add(each)
        return reduce(torch.add, parts), tally.means()

    def evaluate(self, engine: Engine, name: str, batches: Iterable[Mapping[str, Any]]) -> Evaluation:
        """Return the mean loss over all rows of a set; the model is in the mode that is wanted."""
        began_s = time.perf_counter()
        tally = Tally()
        for group in engine.together.groups(batches, ids_of):
            for losses, shown in engine.together.run(
                [partial(self._losses, engine, batch) for batch in group]
            ):
                tally.add({"loss": losses, **shown})
        means = tally.means()
        return Evaluation(
            name=name,
            loss=means.pop("loss"),
            count=tally.num_rows,
            unit="rows",
            shown=means,
            seconds=time.perf_counter() - began_s,
        )

    def _losses(self, engine: Engine, batch: Mapping[str, Any]) -> tuple[Tensor, Shown]:
        sums = row_losses(engine, {name: batch[name] for name in _OF_MODEL})
        return losses_of(self._settings, -sums, batch)
