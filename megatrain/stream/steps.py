"""Runs an engine's steps from zero gradients, and drops one that an error has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.stream.failures import explained
from megatrain.stream.forward.arrangement import Arrangement
from megatrain.stream.forward.model_forward import ModelForward
from megatrain.stream.meter import StepMeter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Steps:
    """The steps of one engine."""

    def __init__(
        self, model: PreTrainedModel, forward: ModelForward, arrangement: Arrangement, meter: StepMeter
    ) -> None:
        """Run steps of `model` through its `forward`."""
        self._model = model
        self._forward = forward
        self._arrangement = arrangement
        self._meter = meter

    def run(
        self,
        losses: Sequence[Callable[[], Tensor]],
        seeds: Sequence[int] | None,
        num_targets: int | None,
        *,
        only_loss: bool = False,
    ) -> list[Tensor]:
        """Run a step's calls and their backward; see `Engine.run_losses`.

        Args:
            losses: One per micro-batch.
            seeds: One per micro-batch; None: they are drawn if the calls take turns.
            num_targets: Tokens that the step trains on; None: counted as they pass.
            only_loss: As in `ModelForward.run_step`.
        """
        if not losses:
            raise ConfigError("a step needs at least one micro-batch; the list is empty")
        if seeds is not None and len(seeds) != len(losses):
            raise ConfigError(f"the step got {len(seeds)} seeds for {len(losses)} micro-batches")
        if seeds is None and self._arrangement.choice.lockstep > 1 and len(losses) > 1:
            seeds = torch.randint(2**62, (len(losses),)).tolist()
        self.zero_grad()
        self._meter.begin(num_targets)
        try:
            return self._forward.run_step(losses, seeds, only_loss=only_loss)
        except BaseException as error:
            self.drop(error)
            instead = explained(error, self._model, self._arrangement.lanes.device)
            if instead is not None:
                raise instead from error
            raise

    def zero_grad(self) -> None:
        """Drop the gradients gathered since the last step."""
        if self._arrangement.gradients.blocks:
            self._meter.drop()
        self._arrangement.rounds.drop_gradients()

    def drop(self, error: BaseException) -> None:
        """Drop a step that an error has ended; a loss of the state if it was changed before."""
        self._arrangement.rounds.drop(error)
        self._meter.drop()
