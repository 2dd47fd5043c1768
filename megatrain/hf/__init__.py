"""Hugging Face's trainers over streamed models: Trainer, and TRL's SFT, DPO, KTO, GRPO and RLOO trainers.

The names resolve on first use, so that TRL is loaded by its own trainers alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.lazy import resolver

if TYPE_CHECKING:
    from megatrain.hf.arguments import MegatrainArguments
    from megatrain.hf.dpo import StreamingDPOTrainer
    from megatrain.hf.grpo import StreamingGRPOTrainer, StreamingRLOOTrainer
    from megatrain.hf.kto import StreamingKTOTrainer
    from megatrain.hf.sft import StreamingSFTTrainer
    from megatrain.hf.trainer import StreamingTrainer

__all__ = [
    "MegatrainArguments",
    "StreamingDPOTrainer",
    "StreamingGRPOTrainer",
    "StreamingKTOTrainer",
    "StreamingRLOOTrainer",
    "StreamingSFTTrainer",
    "StreamingTrainer",
]


__getattr__ = resolver(
    __name__,
    {
        "hf.arguments": ("MegatrainArguments",),
        "hf.dpo": ("StreamingDPOTrainer",),
        "hf.grpo": ("StreamingGRPOTrainer", "StreamingRLOOTrainer"),
        "hf.kto": ("StreamingKTOTrainer",),
        "hf.sft": ("StreamingSFTTrainer",),
        "hf.trainer": ("StreamingTrainer",),
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
