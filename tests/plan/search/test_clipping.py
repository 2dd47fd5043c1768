"""Clipped runs that did not fit: gradients wait where there is room, and outer blocks stream.

Rates of the bundled machines may change, so what is asserted of time is a share of the same run unclipped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.plan import Plan
from megatrain.hardware import GIB, HardwareSpec, load_machine
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.search.neighbours import neighbours
from megatrain.plan.search.options import is_allowed
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request
from megatrain.plan.search.search import SEARCH_OPERATIONS

SOON = 8_000
"""Operations of a search that finds what is nearly as fast as the best."""


def qwen(layers: int, hidden: int, inner: int, heads: int, groups: int) -> PretrainedConfig:
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=152064,
        tie_word_embeddings=False,
    )


def plan(
    config: PretrainedConfig,
    spec: HardwareSpec,
    seq_len: int,
    count: int,
    *,
    budget: int = SEARCH_OPERATIONS,
    **more: Any,
) -> Plan:
    anatomy = count_anatomy(config, micro_batch_size=1, seq_len=seq_len, precision="bf16")
    batch = StepBatch(micro_batch_size=1, seq_len=seq_len, num_micro_batches=count)
    made = make_plan(Request(spec=spec, anatomy=anatomy, batch=batch, **more), budget=budget)
    if made.fits:
        assert made.step_s >= (1 - 1e-9) * max(made.bounds_s.values())
        assert all(made.tier_bytes(tier) <= limit for tier, limit in made.limits.items())
    return made


def test_dense_120b_clips_within_five_percent_of_no_clipping() -> None:
    """On one H200 with 4 TB on drives and 1.5e12 bytes of RAM, which hold 12 bytes per parameter."""
    config = LlamaConfig(
        hidden_size=10240,
        num_hidden_layers=88,
        intermediate_size=35840,
        num_attention_heads=80,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    spec = load_machine("h200").with_ram(1_500_000_000_000).with_drive_bytes(4 * 10**12)
    at_once = Choice(updates="immediate")
    clipped = plan(config, spec, 4096, 8, budget=SOON)
    free = plan(config, replace(spec, drives=None), 4096, 8, budget=SOON, clips=False, choice=at_once)
    assert clipped.fits
    assert free.fits
    assert clipped.step_s <= 1.05 * free.step_s
    assert not clipped.choice.tiers, "no state is on drives"
    assert set(clipped.choice.gradients) >= {"device", "nvme"}
    assert not plan(config, replace(spec, drives=None), 4096, 8).fits


def test_7b_clips_on_ten_gigabytes() -> None:
    """Embedding and head with the sums of their gradients would take 6.1 of 8.85 GiB, and all stays near
    what the device computes.
    """
    spec = replace(load_machine("rtx-3080").with_ram(128 * GIB), drives=None)
    config = qwen(28, 3584, 18944, 28, 4)
    made = plan(config, spec, 1024, 32, budget=SOON)
    assert made.fits
    assert made.choice.outer_streams
    assert made.step_s < 1.1 * made.bounds_s["compute"]
    assert not plan(config, spec, 1024, 32, choice=Choice(outer_streams=False)).fits


@pytest.mark.parametrize("clips", [True, False])
def test_14b_fits_on_a_3090_with_a_drive(clips: bool) -> None:
    spec = load_machine("rtx-3090").with_ram(128 * GIB)
    made = plan(qwen(48, 5120, 13824, 40, 8), spec, 1024, 32, budget=1, clips=clips)
    assert made.fits
    assert made.choice.tier("moments") == "nvme"


def test_what_is_tried_beside_a_choice_is_what_the_engine_can_run() -> None:
    """With outer blocks that stream, none of its neighbours has them on the device for good."""
    anatomy = count_anatomy(qwen(6, 64, 128, 4, 2), micro_batch_size=1, seq_len=64, precision="bf16")
    batch = StepBatch(micro_batch_size=1, seq_len=64, num_micro_batches=4)
    request = Request(spec=load_machine("rtx-3080"), anatomy=anatomy, batch=batch)
    streams = replace(Choice(outer_streams=True).with_defaults(6), lockstep=2)
    for choice in (streams, replace(streams, outer_streams=False, outer_resident=True)):
        tried = list(neighbours(request, choice))
        assert any(found.resident_layers for found in tried), "what is resident is among the questions"
        assert [found for found in tried if not is_allowed(request, found)] == []


@pytest.mark.parity
def test_twice_the_micro_batches_are_no_slower() -> None:
    """In one round with boundaries on drives: sums of rounds would take RAM from the state of a 14B model."""
    config = qwen(48, 5120, 13824, 40, 8)
    spec = load_machine("rtx-4090").with_ram(128 * GIB)
    once, twice = (plan(config, spec, 4096, count) for count in (32, 64))
    assert twice.tokens_per_s >= once.tokens_per_s
