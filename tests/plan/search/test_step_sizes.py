"""A larger step fits wherever a smaller one does, where drives hold what it adds: sums and boundaries."""

from __future__ import annotations

from functools import cache

import pytest
from transformers import LlamaConfig, Qwen2Config

from megatrain.config.choice import StepBatch
from megatrain.hardware import load_machine
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.search.choices import first_fit
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request

GIB = 1 << 30

CONFIGS = {
    "llama 8B": lambda: LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "qwen 0.5B": lambda: Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}


@cache
def anatomy_of(model: str, rows: int, seq_len: int) -> Anatomy:
    return count_anatomy(CONFIGS[model](), micro_batch_size=rows, seq_len=seq_len, precision="bf16")


def asked(
    model: str,
    count: int,
    *,
    rows: int,
    seq_len: int = 1024,
    machine: str = "rtx-4090",
    ram: int,
    drives: float = 1.6e12,
    clips: bool = True,
) -> Request:
    return Request(
        spec=load_machine(machine).with_ram(ram * GIB).with_drive_bytes(int(drives)),
        anatomy=anatomy_of(model, rows, seq_len),
        batch=StepBatch(micro_batch_size=rows, seq_len=seq_len, num_micro_batches=count),
        clips=clips,
        compiles=True,
    )


def test_larger_steps_fit_and_are_not_slower() -> None:
    """8 B on one RTX 4090 with 64 GiB and a drive, in micro-batches of 16 x 1,024 tokens."""
    plans = [make_plan(asked("llama 8B", count, rows=16, ram=64), budget=1_500) for count in (8, 32, 128)]
    assert all(plan.fits for plan in plans)
    speeds = [plan.tokens_per_s for plan in plans]
    assert speeds == sorted(speeds)
    assert plans[-1].choice.sums == "nvme", "128 fit on the device in several rounds only"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "rows", "machine", "sizes"),
    [
        ("llama 8B", 16, "rtx-4090", (26, 64)),
        ("llama 8B", 4, "h100", (26, 96)),
        ("qwen 0.5B", 8, "rtx-3090", (5, 8)),
    ],
)
@pytest.mark.parametrize("clips", [True, False])
def test_twice_the_micro_batches_fit_where_half_of_them_do(
    model: str, rows: int, machine: str, sizes: tuple[int, ...], clips: bool
) -> None:
    for ram in sizes:
        fits = [
            first_fit(asked(model, 1 << doublings, rows=rows, machine=machine, ram=ram, clips=clips))
            for doublings in range(10)
        ]
        assert all(choice is not None for choice in fits), (ram, [choice is not None for choice in fits])
