"""The time of a layer's visit beside its arithmetic: launches, hooks, Python."""

from __future__ import annotations

import time

import torch

from megatrain.config.choice import Choice
from megatrain.stream.attach.attach import attach
from megatrain.stream.attach.load import load

_FEW_LAYERS = 2
_STEPS = 12


def visit_overhead_s(device: torch.device, *, num_layers: int = 10) -> float:
    """Return the seconds of a visit of a layer so small that its arithmetic takes no time.

    Steps of a model of many layers are compared with steps of one of 2, so that embedding, head and loss drop
    out; each layer is visited once forward and once backward, and its update is part of the step. Layers are
    not compiled, and torch has one thread: on a busy machine, threads that wait for each other would be all
    that is measured.

    Args:
        device: where blocks run.
        num_layers: of the larger model.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        more = _step_s(device, num_layers) - _step_s(device, _FEW_LAYERS)
    finally:
        torch.set_num_threads(num_threads)
    return max(0.0, more / (num_layers - _FEW_LAYERS) / 2)


def _step_s(device: torch.device, num_layers: int) -> float:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    model = load(config=config, seed=0, precision="bf16").train()
    choice = Choice(activations=("keep",) * num_layers).with_defaults(num_layers)
    engine = attach(model, choice, device=str(device), precision="bf16", compile="off")
    try:
        optimizer = engine.adamw(lr=0.0)
        tokens = torch.zeros(1, 8, dtype=torch.long)
        taken = []
        for _ in range(_STEPS):
            began_s = time.perf_counter()
            engine.forward_backward([{"input_ids": tokens, "labels": tokens}])
            optimizer.step()
            engine.sync()
            taken.append(time.perf_counter() - began_s)
        return sorted(taken)[_STEPS // 4]
    finally:
        engine.detach()
        engine.lanes.close()
