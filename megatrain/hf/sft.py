"""`trl.SFTTrainer` over a streamed model."""

from __future__ import annotations

from typing import Any

from trl import SFTTrainer

from megatrain.hf.steps import StepGroup
from megatrain.hf.streaming import Streaming


class StreamingSFTTrainer(Streaming, SFTTrainer):
    """Trains as `trl.SFTTrainer` does, with TRL's own loss and the model's state in host memory.

    Arguments are those of SFTTrainer, and `megatrain=MegatrainArguments(...)`.
    """

    def _has_run(self, group: StepGroup) -> None:
        order_metrics(self._metrics["train"], group)


def order_metrics(metrics: dict[str, list[Any]], group: StepGroup) -> None:
    """Put what a step's calls have logged in the order of its batches: TRL adds the values up in theirs."""
    count = len(group.finished)
    for values in metrics.values():
        if len(values) >= count:  # others hold one number that counts on
            values[-count:] = group.in_order(values[-count:])
