"""Tiny configurations of model families: those of the tests, and of others that transformers can build.

Each has 4 layers, a hidden size of 32, a vocabulary of 128 and no dropout. Of a family that is not in the
tests, the fields that its configuration has are taken out of one table.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.families import FAMILIES, MAX_POSITIONS, VOCAB_SIZE

OTHERS = [
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "biogpt",
    "bitnet",
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "doge",
    "ernie4_5",
    "exaone4",
    "exaone_moe",
    "falcon_mamba",
    "flex_olmo",
    "gemma",
    "glm",
    "glm4_moe",
    "gpt_bigcode",
    "gpt_neox_japanese",
    "gptj",
    "granite_swa",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "internlm3",
    "jais2",
    "laguna",
    "lfm2",
    "llama4_text",
    "mamba",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "ministral",
    "mistral",
    "modernbert-decoder",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "persimmon",
    "phi3",
    "phimoe",
    "qwen2_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "xglm",
]
"""Types of models, beside those of the tests."""

PACKED = ("llama", "llama_tied", "qwen2", "qwen3", "olmo2", "granite", "mistral", "seed_oss", "smollm3")
"""Families that read from positions where the documents of a row begin."""

_DROPOUTS = ("dropout", "pdrop", "dropout_rate", "dropout_prob")
_OTHER_DROPOUTS = ("classifier_dropout", "summary_first_dropout")

_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), MAX_POSITIONS),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
    "rotary_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "state_size": 8,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "dropout", "activation_dropout"), 0.0),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "layerdrop"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}


def names() -> list[str]:
    """Return the names of all families."""
    return [*FAMILIES, *OTHERS]


def config_of(family: str, *, dropout: bool = False) -> PretrainedConfig:
    """Make a family's configuration, with every dropout at 0.1 if wanted."""
    config = FAMILIES[family]() if family in FAMILIES else _other(family)
    for key in config.to_dict() if dropout else ():
        if key.endswith(_DROPOUTS) and key not in _OTHER_DROPOUTS:
            setattr(config, key, 0.1)
    return config


def _other(family: str) -> PretrainedConfig:
    kind = CONFIG_MAPPING[family]
    known = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    known |= set(inspect.signature(kind.__init__).parameters)
    return kind(**{name: value for name, value in _FIELDS.items() if name in known})
