"""A streamed model in tiles has the bits of a resident one in tiles, whatever stays, waits or runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.model.blocks import find_blocks
from megatrain.model.tiles import attention
from megatrain.model.tiles.position_wise import tile
from tests.expert_families import APART
from tests.families import FAMILIES
from tests.products import pairwise_rows
from tests.reference import make_batches
from tests.stream.runs import add_adapters, assert_same_round, assert_same_steps, start
from tests.tiles import note_calls

TILE = 7
"""Tokens; rows have 16: a last tile is shorter."""

ROWS = pairwise_rows(
    {
        "family": ["llama", "qwen3", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "phi", "llama_tied"],
        "activations": ["recompute", "keep", "offload", "recompute_cheap", "keep_attention"],
        "boundaries": ["device", "host"],
        "precision": ["fp32", "bf16"],
        "fragments": [False, True],
        "lockstep": [2, 1, 3],
        "device": ["checked", "emulated", "cpu"],
        "resident_layers": [0, 1],
        "outer_streams": [False, True],
    }
)


@pytest.fixture(autouse=True)
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these short rows pass attention in groups of heads, as long ones do."""
    monkeypatch.setattr(attention, "LEAST_IN_GROUPS", 0)


def start_in_tiles(family: str, **settings: Any) -> tuple[Any, Any, Any, Any]:
    """Make a family's model twice, resident and attached, in tiles both."""
    config = {**FAMILIES, **APART}[family]()
    model, reference, engine, optimizer = start(config=config, tile_tokens=TILE, **settings)
    layers = [block.module for block in find_blocks(reference.model) if block.module is not None]
    tile(reference.model, layers, TILE)
    return model, reference, engine, optimizer


@pytest.mark.parametrize(
    "row",
    [*ROWS[::3], *(pytest.param(row, marks=pytest.mark.parity) for n, row in enumerate(ROWS) if n % 3)],
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_tiles_equal_a_resident_model_in_tiles(row: dict[str, Any]) -> None:
    settings = dict(row)
    if {**FAMILIES, **APART}[settings["family"]]().tie_word_embeddings:
        settings["outer_streams"] = False
    settings["num_slots"] = 3 if settings["fragments"] else 2
    settings["num_gradient_buffers"] = 3
    _, reference, engine, optimizer = start_in_tiles(num_micro_batches=3, **settings)
    engine.arrangement.offloaded._min_bytes = 1
    with pytest.MonkeyPatch.context() as patch:
        calls = note_calls(patch)
        assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=3)
    assert len(calls) >= 2 * 2 * 3 * 3  # resident and streamed, steps, micro-batches, and modules at least
    engine.detach()


@pytest.mark.parametrize("chunks", [1, 4])
def test_experts_come_apart_beside_tiles(chunks: int) -> None:
    _, reference, engine, optimizer = start_in_tiles(
        "glm4_moe", expert_chunks=chunks, lockstep=2, num_micro_batches=2, num_slots=3, num_gradient_buffers=2
    )
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    engine.detach()


def test_adapters_in_tiles() -> None:
    pytest.importorskip("peft")

    _, reference, engine, optimizer = start_in_tiles(
        "llama", prepare=add_adapters, num_micro_batches=2, lockstep=2
    )
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    engine.detach()


@pytest.mark.parametrize("activations", ["recompute", "keep_attention"])
def test_tiles_under_autocast(activations: str) -> None:
    _, reference, engine, _ = start_in_tiles("llama", activations=activations, boundaries="host")
    engine.arrangement.offloaded._min_bytes = 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_round(engine, reference, make_batches(1))
    assert all(gradient.isfinite().all() for _, gradient in engine.named_gradients())
    engine.zero_grad()
    engine.detach()


def test_detached_modules_are_their_classes_own_again() -> None:
    model, _, engine, _ = start_in_tiles("llama")
    assert any("forward" in module.__dict__ for module in model.modules())
    engine.detach()
    assert not any("forward" in module.__dict__ for module in model.modules())
