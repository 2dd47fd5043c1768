"""`trl.GRPOTrainer` and `trl.RLOOTrainer` over a streamed model: a step's completions come before its losses.

These trainers generate for a whole step in its first micro-batch, and count micro-batches to find the part of
each. In lockstep the last one begins first. So the inputs of all are prepared in order before any loss. Then
a step generates once, at the moment and with the random numbers of the plain class, and its program has one
pass for each micro-batch. Log-probabilities of a reference, and old ones, are computed there too.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from megatrain.errors import ConfigError
from megatrain.hf.batches.steps import StepGroup
from megatrain.hf.streaming import Streaming
from megatrain.stream.steps import PassBefore

_log = logging.getLogger(__name__)

_REFUSED = {
    "use_vllm": "vLLM would be given weights while they are updated; let the streamed model generate",
    "use_transformers_continuous_batching": "it casts the model, whose weights the engine holds",
    "sync_ref_model": "it reads weights while they are updated; an adapter has its base as the reference",
    "use_adaptive_entropy": "it adds up micro-batches in the order in which they begin; use entropy_coef",
}


class Ready(dict[str, Any]):
    """The prepared inputs of a micro-batch."""


class Generating(Streaming):
    """Comes before a trainer of TRL that generates its training data, in a class's bases."""

    _in_order = ("_step", "_buffered_inputs", "_current_train_step_time")
    _step: int
    """The number of micro-batches so far, which is TRL's."""
    _step_after: int
    """The number of micro-batches once those of the step have passed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer; see `Streaming`.

        Raises:
            ConfigError: The arguments ask for something that cannot be done while the model streams.
        """
        own = {key: value for key, value in kwargs.items() if key != "megatrain"}
        config = inspect.signature(super(Streaming, self).__init__).bind(*args, **own).arguments.get("args")
        for name, why in _REFUSED.items():
            if getattr(config, name, False):
                raise ConfigError(f"{name}=True: {why}")
        super().__init__(*args, **kwargs)
        if getattr(self, "ref_model", None) is not None:
            _log.warning(
                "beta=%g holds a second, resident model as the reference; beta=0 has none, and that of an "
                "adapter (peft_config=LoraConfig(...)) is its base",
                self.beta,
            )

    def _require_same(self) -> None:
        if self._ranks.size > 1:
            raise ConfigError(
                f"{type(self).__name__} trains in one process: each of several would draw completions of its "
                "own; start one"
            )

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return a batch's loss; the first of a step prepares the inputs of all of its batches."""
        model.train()  # the plain step does so before it generates
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._step = self._step_after
        return loss

    def _passes_before(self, group: StepGroup) -> list[PassBefore]:
        first, given = self._step, list(group.inputs)
        for number, batch in enumerate(given):
            if number == 0 or batch is not given[number - 1]:  # else the last is repeated to fill up the runs
                self._step = first + number
                ready = Ready(super()._prepare_inputs(batch))
            group.inputs[number] = ready
        self._step, self._step_after = first, self._step + 1
        return []

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs if isinstance(inputs, Ready) else super()._prepare_inputs(inputs)


class StreamingGRPOTrainer(Generating, GRPOTrainer):
    """Trains as `trl.GRPOTrainer` does, with TRL's own loss and the model's state in host memory.

    Arguments are those of GRPOTrainer, and `megatrain=MegatrainArguments(...)`. The streamed model generates,
    and every token of a completion fetches all layers: this is for small models, until generation runs beside
    it.
    """


class StreamingRLOOTrainer(Generating, RLOOTrainer):
    """Trains as `trl.RLOOTrainer` does; see `StreamingGRPOTrainer`."""
