"""`trl.DPOTrainer` over a streamed model."""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from typing import Any

from trl import DPOTrainer

from megatrain.errors import ConfigError
from megatrain.hf.sft import order_metrics
from megatrain.hf.steps import StepGroup
from megatrain.hf.streaming import Streaming

_log = logging.getLogger(__name__)


class StreamingDPOTrainer(Streaming, DPOTrainer):
    """Trains as `trl.DPOTrainer` does, with TRL's own loss and the model's state in host memory.

    Arguments are those of DPOTrainer, and `megatrain=MegatrainArguments(...)`. Without an adapter, the
    reference is computed beforehand (`precompute_ref_log_probs=True`) on the streamed model: a resident
    reference would take the room that streaming makes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer; see `Streaming`.

        Raises:
            ConfigError: It would hold a resident reference model.
        """
        own = {key: value for key, value in kwargs.items() if key != "megatrain"}
        given = inspect.signature(DPOTrainer.__init__).bind(self, *args, **own).arguments
        has_adapter = given.get("peft_config") is not None or hasattr(given["model"], "peft_config")
        config = given.get("args")
        beforehand = getattr(config, "precompute_ref_log_probs", False)
        if given.get("ref_model") is not None or not (has_adapter or beforehand):
            raise ConfigError(
                "DPO would hold a second, resident model as its reference; leave ref_model out and pass "
                "precompute_ref_log_probs=True in DPOConfig, or train an adapter "
                "(peft_config=LoraConfig(...)), whose base is the reference"
            )
        super().__init__(*args, **kwargs)

    def _stream(self) -> None:
        super()._stream()
        if (
            hasattr(self.model, "peft_config")
            and not self.precompute_ref_logps
            and self.engine.choice.lockstep > 1
        ):
            _log.warning(
                "the reference runs with the adapters off, which is a state of the whole model: "
                "micro-batches pass one by one (lockstep=1); with precompute_ref_log_probs=True they pass "
                "together"
            )
            self.engine.reconfigure(replace(self.engine.choice, lockstep=1))

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._stream()  # the plain class computes them before it is complete
        return super()._precompute_ref_logps(*args, **kwargs)

    def _has_run(self, group: StepGroup) -> None:
        order_metrics(self._metrics["train"], group)
