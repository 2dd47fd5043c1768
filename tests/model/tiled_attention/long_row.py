"""Trains on one long row, and prints its loss and the memory that it took: run as a process of its own."""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

import torch
from transformers import Gemma2Config, GptOssConfig, MistralConfig, PretrainedConfig, Qwen3Config

from megatrain.config.attention import TILED
from megatrain.model.documents.begins import set_attention
from tests.reference import attach_plainly, make_model

TOKENS = 20_000
_SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 1 << 17,
}


def config_of(family: str) -> PretrainedConfig:
    """Return the configuration of a small model, whose two layers differ where the family has two kinds."""
    match family:
        case "gemma2":
            return Gemma2Config(**_SMALL, sliding_window=4096)
        case "gpt_oss":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
            return GptOssConfig(**_SMALL, **experts, sliding_window=128)
        case "mistral":
            return MistralConfig(**_SMALL, sliding_window=4096)
        case "qwen3":
            return Qwen3Config(**_SMALL, use_sliding_window=True, sliding_window=1024, max_window_layers=1)
    raise AssertionError(family)


def batch_of(tokens: int) -> dict[str, Any]:
    """Make a row of three documents."""
    ids = torch.randint(3, 120, (1, tokens), generator=torch.Generator().manual_seed(0))
    lengths = tokens // 5, tokens // 100, tokens - tokens // 5 - tokens // 100
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
    }


def peak() -> int:
    """Return the most memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main(family: str, device: str) -> None:
    """Train on a short row, then on the long one."""
    if device != "cpu":
        from tests.host_device.device import register

        register()
    model = make_model(config_of(family))
    set_attention(model, TILED)
    engine = attach_plainly(model, device=device, activations="recompute")
    engine.forward_backward([batch_of(600)])
    before = peak()
    loss = float(engine.forward_backward([batch_of(TOKENS)]))
    norms = {name: float(gradient.float().norm()) for name, gradient in engine.named_gradients()}
    print(json.dumps({"loss": loss, "norms": norms, "nbytes": peak() - before}))
    engine.detach()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
