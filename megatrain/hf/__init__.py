"""Hugging Face's trainers over streamed models: Trainer, and TRL's SFT, DPO, KTO, GRPO and RLOO trainers.

The names resolve on first use, so that TRL is loaded by its own trainers alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.hf.arguments import MegatrainArguments
    from megatrain.hf.dpo import StreamingDPOTrainer
    from megatrain.hf.grpo import StreamingGRPOTrainer, StreamingRLOOTrainer
    from megatrain.hf.kto import StreamingKTOTrainer
    from megatrain.hf.sft import StreamingSFTTrainer
    from megatrain.hf.trainer import StreamingTrainer

_HOMES = {
    "MegatrainArguments": "megatrain.hf.arguments",
    "StreamingDPOTrainer": "megatrain.hf.dpo",
    "StreamingGRPOTrainer": "megatrain.hf.grpo",
    "StreamingKTOTrainer": "megatrain.hf.kto",
    "StreamingRLOOTrainer": "megatrain.hf.grpo",
    "StreamingSFTTrainer": "megatrain.hf.sft",
    "StreamingTrainer": "megatrain.hf.trainer",
}

__all__ = [
    "MegatrainArguments",
    "StreamingDPOTrainer",
    "StreamingGRPOTrainer",
    "StreamingKTOTrainer",
    "StreamingRLOOTrainer",
    "StreamingSFTTrainer",
    "StreamingTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatrain.hf' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
