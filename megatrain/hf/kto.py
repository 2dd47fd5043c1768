"""`trl.KTOTrainer` over a streamed model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from trl import KTOTrainer

from megatrain.hf.batches.steps import StepGroup
from megatrain.hf.references import WithReference
from megatrain.stream.steps import PassBefore

_OWN = "own_KL_logps"
"""The key of the model's log-probabilities of the mismatched completions among a batch's inputs."""


class StreamingKTOTrainer(WithReference, KTOTrainer):
    """Trains as `trl.KTOTrainer` does, with TRL's own loss and the model's state in host memory.

    Arguments are those of KTOTrainer, and `megatrain=MegatrainArguments(...)`. The reference is that of
    `StreamingDPOTrainer`. The passes of mismatched completions, which the estimate of the divergence takes,
    have no gradients either: they come before the losses too.
    """

    calculate_KL: bool
    """Whether the loss has an estimate of the divergence; the attribute is TRL's."""
    _own: Tensor | None = None
    """The model's log-probabilities for the batch whose loss begins."""

    @staticmethod
    def _count_passes(config: Any, *, in_step: bool) -> int:
        has_divergence = config.loss_type != "apo_zero_unpaired"
        return in_step + has_divergence + (in_step and has_divergence)

    def _passes_before(self, group: StepGroup) -> list[PassBefore]:
        def reference(inputs: Any) -> dict[str, Tensor]:
            return {"ref_logps": self.compute_ref_log_probs(self.model, inputs)[0]}

        def divergence_of_reference(inputs: Any) -> dict[str, Tensor]:
            return {"ref_KL_logps": self._compute_kl_logps(self.model, inputs)}

        def divergence(inputs: Any) -> dict[str, Tensor]:
            return {_OWN: self._compute_kl_logps(self.model, inputs)}

        before = []
        if self._reference_is_in_step:
            before.append(self._before(group, reference, self._as_reference_alone))
        if self._reference_is_in_step and self.calculate_KL:
            before.append(self._before(group, divergence_of_reference, self._as_reference))
        if self.calculate_KL:
            before.append(self._before(group, divergence))
        return before

    @contextmanager
    def _as_reference_alone(self) -> Iterator[None]:
        """Act as `_as_reference` does, for the completions that belong to the prompts."""
        with mock.patch.object(self, "calculate_KL", False), self._as_reference():
            yield

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss, which begins with the log-probabilities of mismatched completions."""
        self._own = inputs.get(_OWN)
        rest = {key: value for key, value in inputs.items() if key != _OWN}
        return super().compute_loss(model, rest, *args, **kwargs)

    def _compute_kl_logps(self, model: Any, batch: Any) -> Any:
        found, self._own = self._own, None
        return super()._compute_kl_logps(model, batch) if found is None else found
