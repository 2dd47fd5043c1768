"""`transformers.Trainer` over a streamed model."""

from __future__ import annotations

from transformers import Trainer

from megatrain.hf.streaming import Streaming


class StreamingTrainer(Streaming, Trainer):
    """Trains as `transformers.Trainer` does, with the model's state in host memory.

    Arguments are those of Trainer, and `megatrain=MegatrainArguments(...)`.
    """
