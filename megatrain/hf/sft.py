"""`trl.SFTTrainer` over a streamed model."""

from __future__ import annotations

from trl import SFTTrainer

from megatrain.hf.streaming import Streaming


class StreamingSFTTrainer(Streaming, SFTTrainer):
    """Trains as `trl.SFTTrainer` does, with TRL's own loss and the model's state in host memory.

    Arguments are those of SFTTrainer, and `megatrain=MegatrainArguments(...)`.
    """
