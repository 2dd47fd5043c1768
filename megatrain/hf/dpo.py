"""`trl.DPOTrainer` over a streamed model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from trl import DPOTrainer

from megatrain.hf.batches.steps import StepGroup
from megatrain.hf.references import WithReference
from megatrain.stream.steps import PassBefore


class StreamingDPOTrainer(WithReference, DPOTrainer):
    """Trains as `trl.DPOTrainer` does, with TRL's own loss and the model's state in host memory.

    Arguments are those of DPOTrainer, and `megatrain=MegatrainArguments(...)`. Without an adapter, the
    reference is computed beforehand (`precompute_ref_log_probs=True`) on the streamed model: a resident
    reference would take the room that streaming makes.
    """

    def _passes_before(self, group: StepGroup) -> list[PassBefore]:
        def reference(inputs: Any) -> dict[str, Tensor]:
            chosen, rejected = self.compute_ref_log_probs(self.model, inputs)
            return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

        return [self._before(group, reference, self._as_reference)] if self._reference_is_in_step else []
