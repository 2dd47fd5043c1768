"""How many experts a token passes, and configurations in which it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, JambaConfig

import megatrain
from megatrain.errors import ModelError
from megatrain.model.expert_numbers import experts_of, require_possible
from megatrain.model.profile.count import count_anatomy
from megatrain.model.weights.skeleton import build_skeleton
from tests.expert_families import APART, NUM_EXPERTS
from tests.kinds import kinds, tiny_config
from tests.stream.test_every_class import NOT_BUILT


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("active", [0, NUM_EXPERTS + 1, -1])
def test_a_token_passes_one_expert_or_more_and_no_more_than_there_are(family: str, active: int) -> None:
    config = APART[family]()
    config.num_experts_per_tok = active
    said = f"config.json has num_experts_per_tok {active} and .* a token passes 1 to {NUM_EXPERTS} experts"
    with pytest.raises(ModelError, match=said):
        count_anatomy(config, micro_batch_size=1, seq_len=16, precision="fp32")
    with pytest.raises(ModelError, match=said):
        megatrain.load(config=config)
    config.num_experts_per_tok = NUM_EXPERTS
    require_possible(config)


def test_what_a_dense_model_says_of_experts_does_not_matter() -> None:
    require_possible(JambaConfig(num_experts=1, num_experts_per_tok=2))


def test_every_class_of_transformers_is_possible() -> None:
    """By the defaults of its own configuration, and as a tiny one."""
    for name in kinds().keys() - NOT_BUILT.keys():
        require_possible(tiny_config(name))


def test_a_configuration_of_another_class_is_named(tmp_path: Path) -> None:
    """Mixtral's sizes under the name of another type: torch says `unsupported operand`."""
    values = {**APART["mixtral"]().to_dict(), "architectures": ["MixtralForCausalLM"], "head_dim": None}
    (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": "qwen3_moe"}))
    said = "names MixtralForCausalLM and model_type qwen3_moe, which is Qwen3MoeForCausalLM: take the"
    with pytest.raises(ModelError, match=said):
        build_skeleton(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)


def test_numbers_of_experts_by_any_name() -> None:
    assert experts_of(APART["gpt_oss"]()) == experts_of(APART["deepseek_v3"]()) == (NUM_EXPERTS, 2)
