"""Tiny models with experts that come apart: a chunk of each is whole pages of both matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV3Config,
    FlexOlmoConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

NUM_EXPERTS = 8

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
_INNER = {"intermediate_size": 48, "moe_intermediate_size": 32}
_GROUPED = {**_COMMON, **_INNER, "n_routed_experts": NUM_EXPERTS, "n_group": 2, "topk_group": 1}
_SHARED = {**_GROUPED, "n_shared_experts": 1, "first_k_dense_replace": 1}


def _mixtral() -> PretrainedConfig:
    return MixtralConfig(
        **_COMMON,
        intermediate_size=32,
        num_local_experts=NUM_EXPERTS,
        output_router_logits=True,
        router_aux_loss_coef=0.05,
    )


def _deepseek_v3() -> PretrainedConfig:
    heads = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    return DeepseekV3Config(**{**_SHARED, **heads, "q_lora_rank": 16, "kv_lora_rank": 16})


def _qwen2_moe() -> PretrainedConfig:
    return Qwen2MoeConfig(**_COMMON, **_INNER, num_experts=NUM_EXPERTS, shared_expert_intermediate_size=48)


APART: dict[str, Callable[[], PretrainedConfig]] = {
    "mixtral": _mixtral,
    "qwen3_moe": lambda: Qwen3MoeConfig(**_COMMON, **_INNER, head_dim=16, num_experts=NUM_EXPERTS),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON, head_dim=16, intermediate_size=32, num_local_experts=NUM_EXPERTS
    ),
    "deepseek_v3": _deepseek_v3,
    "olmoe": lambda: OlmoeConfig(**_COMMON, intermediate_size=32, num_experts=NUM_EXPERTS),
    "granitemoe": lambda: GraniteMoeConfig(**_COMMON, intermediate_size=32, num_local_experts=NUM_EXPERTS),
    "glm4_moe": lambda: Glm4MoeConfig(**_SHARED, head_dim=16),
    "qwen2_moe": _qwen2_moe,
    "flex_olmo": lambda: FlexOlmoConfig(**_COMMON, intermediate_size=32, num_experts=NUM_EXPERTS),
}
"""A config of each kind by name; the last one saves for its backward what its experts return."""

BEHIND = {
    "deepseek_v3": {"mlp.shared_experts"},
    "glm4_moe": {"mlp.shared_experts"},
    "qwen2_moe": {"mlp.shared_expert_gate"},
    "flex_olmo": {"post_feedforward_layernorm"},
}
"""By kind: the modules with weights that a layer calls behind its experts, where there are any."""
