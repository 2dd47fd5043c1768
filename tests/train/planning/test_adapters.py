"""Plans of runs with adapters: what the base takes, and that a step moves what is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import megatrain
from megatrain.config import build_config
from megatrain.config.choice import StepBatch
from megatrain.hardware import load_machine
from megatrain.train.planning.plan_run import plan_run
from tests.reference import attach_plainly, make_batches
from tests.searches import planned_for_a_moment

pytest.importorskip("peft")

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
}
LARGE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
}
"""1.1 billion parameters, as TinyLlama has them. Torch's bf16 product for gradients of inputs takes 10
seconds per token of these on a CPU, so there are few tokens and one step."""


def write_base(directory: Path, shape: dict[str, Any]) -> None:
    """Write a random model in bf16, without ever making it in fp32."""
    config = LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=4, tie_word_embeddings=False)
    from safetensors.torch import save_file

    from megatrain.model.weights.skeleton import build_skeleton

    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    values = (0.02 * torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))).bfloat16()
    tensors = {
        name: values.repeat(-(-parameter.numel() // len(values)))[: parameter.numel()].view(parameter.shape)
        if parameter.ndim > 1
        else torch.ones(parameter.shape, dtype=torch.bfloat16)
        for name, parameter in build_skeleton(config, dtype=torch.bfloat16).named_parameters()
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("shape", "steps", "tokens"),
    [(SMALL, 2, 16), pytest.param(LARGE, 1, 2, marks=pytest.mark.parity)],
    ids=["tiny", "1B"],
)
def test_a_frozen_base_takes_and_moves_what_is_planned(
    shape: dict[str, Any], steps: int, tokens: int, tmp_path: Path
) -> None:
    """2 bytes per parameter on the host; fetched as the program says; no gradient of it goes home."""
    write_base(tmp_path, shape)
    raw: dict[str, Any] = {
        "model": {"path": str(tmp_path)},
        "data": {"path": "none", "seq_len": tokens},
        "train": {
            "precision": "bf16",
            "micro_batch_size": 1,
            "grad_accumulation": 2,
            "activation_budget": 1.0,
            "compile": "off",
        },
        "lora": {"r": 8},
        "memory": {
            "num_slots": 2,
            "num_gradient_buffers": 2,
            "activations": "recompute",
            "lockstep": 2,
            "fragments": False,
            "resident_blocks": 0,
            "boundaries": "device",
            "gradients": "host",
        },
    }
    with planned_for_a_moment():
        plan = plan_run(raw, load_machine("h100"), source="test").plan
    config = build_config(raw)
    model = megatrain.load(tmp_path, precision="bf16", adaptation=config.adaptation)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert 0 < trained < frozen / 5
    batch = StepBatch(micro_batch_size=1, seq_len=tokens, num_micro_batches=2)
    engine = attach_plainly(model.train(), choice=plan.choice, device="cpu", precision="bf16", batch=batch)
    optimizer = engine.adamw(lr=1e-3)
    for step in range(steps):
        engine.forward_backward(make_batches(2, seed=step, rows=1, tokens=tokens))
        optimizer.step()
        engine.settle()
    planes = {name: nbytes for name, nbytes in engine.host.plane_bytes.items() if nbytes}
    assert planes == {name: nbytes for name, nbytes in plan.host_planes.items() if nbytes}
    assert sum(planes.values()) == pytest.approx(2 * frozen + 16 * trained, rel=0.002)
    report = engine.last_step
    assert report.fetch_bytes == plan.bytes_per_step["fetched"]
    assert report.offload_bytes == plan.bytes_per_step["offloaded"]
    assert report.offload_bytes == pytest.approx(4 * trained, rel=0.01), "of adapters, in fp32"
    print(f"{frozen=:,} {trained=:,} {planes=} {report.fetch_bytes=:,} {report.offload_bytes=:,}")
    engine.close()
