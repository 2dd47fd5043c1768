"""Which experts come apart, and what their layer does behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatrain
from megatrain.config.choice import Choice
from megatrain.errors import ConfigError
from megatrain.model.blocks import find_blocks
from megatrain.model.experts.apart import behind_experts, experts_of, part_to_compile
from tests.expert_families import APART, BEHIND
from tests.families import FAMILIES
from tests.reference import make_model
from tests.stream.runs import start


@pytest.mark.parametrize("family", list(APART))
def test_a_small_model_shows_what_runs_behind_the_experts(family: str) -> None:
    """Nothing is run of the model itself, and torch's random state is as it was."""
    model = make_model(APART[family]())
    before = torch.get_rng_state()
    (found,) = behind_experts(model).values()
    assert torch.equal(torch.get_rng_state(), before)
    assert found.modules == BEHIND.get(family, set())
    assert found.saves_output is (family == "flex_olmo")


def test_other_implementations_of_experts_stay_whole() -> None:
    """Their sums are rounded in another order than those of grouped products."""
    model = make_model(APART["mixtral"]())
    layer = model.get_submodule("model.layers.0")
    assert experts_of(layer) is not None
    model.set_experts_implementation("eager")
    assert experts_of(layer) is None
    assert all(block.rows is None for block in find_blocks(model, expert_chunks=4))


def test_attention_is_what_compiles_of_such_a_layer() -> None:
    layer = make_model(APART["glm4_moe"]()).get_submodule("model.layers.1")
    experts = experts_of(layer)
    assert experts is not None
    assert part_to_compile(layer, [experts.module]) is layer.get_submodule("self_attn")


@pytest.mark.parametrize(
    ("family", "settings", "sentence"),
    [
        ("llama", {}, "expert_chunks is 4, but no layer of the model has experts that come apart"),
        (
            "qwen3_moe",
            {"num_slots": 2},
            "num_slots is 2, but 3 fragments of a layer.*or expert_chunks=1|num_slots=3",
        ),
        (
            "qwen3_moe",
            {"activations": ("recompute", "drop_boundary", "recompute")},
            "use activations=recompute, or",
        ),
        ("qwen3_moe", {"lockstep": 2, "num_gradient_buffers": 1}, "gradients of 2 fragments"),
    ],
)
def test_what_cannot_be_is_one_sentence(family: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        start(config={**FAMILIES, **APART}[family](), expert_chunks=4, **settings)


def test_a_hook_on_the_gradient_of_experts_is_refused() -> None:
    model, _, engine, _ = start(config=APART["qwen3_moe"](), expert_chunks=4)
    model.get_parameter("model.layers.1.mlp.experts.down_proj").register_hook(lambda gradient: gradient)
    with pytest.raises(megatrain.errors.ModelError, match="comes in chunks of experts; remove the hook"):
        engine.forward_backward([{"input_ids": torch.ones(1, 4).long(), "labels": torch.ones(1, 4).long()}])


def test_an_engine_keeps_the_chunks_that_its_state_has() -> None:
    _, _, engine, _ = start(config=APART["qwen3_moe"](), expert_chunks=4)
    with pytest.raises(
        ConfigError, match="expert_chunks is 2, but the state is laid out for expert_chunks=4"
    ):
        engine.reconfigure(Choice(**{**engine.choice.given, "expert_chunks": 2}))
    engine.detach()
