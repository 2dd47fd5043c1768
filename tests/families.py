"""Tiny configurations, one per supported family, with the parts on that are easy to get wrong.

`FAMILIES[name]()` makes a fresh config: 4 blocks, hidden size 32 or 64, vocabulary 128, no dropout (a test
that wants dropout sets it). Every id below 128 is a valid token and 0 is the padding token. A forward and
backward of 2 x 16 tokens takes a few milliseconds on one core.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import (
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    JambaConfig,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCAB_SIZE = 128
NUM_BLOCKS = 4
MAX_POSITIONS = 64

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 48}
_ROUTED = {**_GROUPED, "output_router_logits": True, "router_aux_loss_coef": 0.05}


def _llama() -> PretrainedConfig:
    return LlamaConfig(**_GROUPED, tie_word_embeddings=False)


def _llama_tied() -> PretrainedConfig:
    return LlamaConfig(**_GROUPED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)


def _qwen2() -> PretrainedConfig:
    return Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=2)


def _qwen3() -> PretrainedConfig:
    return Qwen3Config(**_GROUPED, head_dim=16, tie_word_embeddings=True)


def _gemma2() -> PretrainedConfig:
    return Gemma2Config(**_GROUPED, head_dim=16, query_pre_attn_scalar=16, sliding_window=8)


def _gemma3_text() -> PretrainedConfig:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        **_GROUPED, head_dim=16, query_pre_attn_scalar=16, sliding_window=8, layer_types=kinds
    )


def _mixtral() -> PretrainedConfig:
    return MixtralConfig(**_ROUTED, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)


def _qwen3_moe() -> PretrainedConfig:
    return Qwen3MoeConfig(
        **_ROUTED,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    )


def _gpt2() -> PretrainedConfig:
    return GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=MAX_POSITIONS,
        n_embd=32,
        n_layer=NUM_BLOCKS,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _gpt_neox() -> PretrainedConfig:
    return GPTNeoXConfig(**_COMMON, intermediate_size=64)


def _phi() -> PretrainedConfig:
    return PhiConfig(**_GROUPED, partial_rotary_factor=0.5, qk_layernorm=True)


def _falcon() -> PretrainedConfig:
    return FalconConfig(**_COMMON, new_decoder_architecture=True, num_kv_heads=2)


def _falcon_alibi() -> PretrainedConfig:
    return FalconConfig(**_COMMON, alibi=True, parallel_attn=False, multi_query=False, bias=True)


def _opt() -> PretrainedConfig:
    return OPTConfig(**_COMMON, ffn_dim=64, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0)


def _bloom() -> PretrainedConfig:
    return BloomConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        n_layer=NUM_BLOCKS,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _deepseek_v3() -> PretrainedConfig:
    return DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4},
        intermediate_size=48,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )


def _gpt_oss() -> PretrainedConfig:
    return GptOssConfig(
        **{**_ROUTED, "intermediate_size": 16},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_POSITIONS // 4,
        },
    )


def _qwen3_next() -> PretrainedConfig:
    return Qwen3NextConfig(
        **_ROUTED,
        head_dim=16,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    )


def _jamba() -> PretrainedConfig:
    return JambaConfig(
        **_ROUTED,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_dt_rank=4,
        tie_word_embeddings=False,
    )


def _mamba2() -> PretrainedConfig:
    return Mamba2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=NUM_BLOCKS,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _olmo2() -> PretrainedConfig:
    return Olmo2Config(**_GROUPED)


def _granite() -> PretrainedConfig:
    return GraniteConfig(
        **_GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.25,
        logits_scaling=2.0,
        tie_word_embeddings=True,
    )


def _glm4() -> PretrainedConfig:
    return Glm4Config(**_GROUPED, head_dim=16, attention_bias=True)


def _mpt() -> PretrainedConfig:
    return MptConfig(
        vocab_size=VOCAB_SIZE,
        d_model=32,
        n_heads=4,
        n_layers=NUM_BLOCKS,
        max_seq_len=MAX_POSITIONS,
        expansion_ratio=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "llama_tied": _llama_tied,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3_text,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "phi": _phi,
    "falcon": _falcon,
    "falcon_alibi": _falcon_alibi,
    "opt": _opt,
    "bloom": _bloom,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "jamba": _jamba,
    "mamba2": _mamba2,
    "olmo2": _olmo2,
    "granite": _granite,
    "glm4": _glm4,
    "mpt": _mpt,
}
