"""A tiny configuration of any kind of model that transformers has, by the defaults of its own configuration.

`tests/families.py` has the families whose every part the tests of the engine turn on; here are all others,
with the layers, the settings and the towers that their classes have by themselves. Sizes are the same for
all: what is 32 wide in one part fits what is 32 wide in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from megatrain.model import small
from tests.model.test_causal import COMPLETED

AS_DIVIDED = {
    *("dots3_note_text", "glm_ocr", "helium", "kimi_k25", "mamba2", "mistral4", "mistral_large4", "xlnet"),
    "xlstm",
}
"""Kinds whose sizes depend on each other in ways of their own: all are divided by one number."""

_WIDTHS = """
hidden_size d_model n_embd emb_dim embed_dim dim_model out_hidden_size embedding_size word_embed_proj_dim
vision_hidden_size text_hidden_size image_text_hidden_size encoder_hidden_size vision_output_dim lru_width
patch_embed_hidden_size backbone_hidden_size attention_hidden_size projection_dim projector_hidden_size
projection_hidden_dim projection_hidden_size projector_output_dim adapter_out_dim merged_hidden_size
adapter_in_dim adapter_input_size
"""
_HEADS = """
num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads
num_decoder_attention_heads num_encoder_attention_heads conf_num_attention_heads num_sliding_attention_heads
swa_num_attention_heads resampler_n_heads resampler_heads linear_num_value_heads
"""
_GROUPS = """
num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_global_key_value_heads
linear_num_key_heads
"""
_HEAD_DIMS = """
head_dim swa_head_dim resampler_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim
attention_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state index_topk
"""
_INNER = "mlp_dim decoder_intermediate_size projection_intermediate_size"
_OF_EXPERTS = "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"

SIZES: dict[str, int] = {
    **{name: 48 for name, kind in small._KIND.items() if kind == "inner width"},
    **dict.fromkeys(_WIDTHS.split(), 32),
    **dict.fromkeys(_HEADS.split(), 4),
    **dict.fromkeys(_GROUPS.split(), 2),
    **dict.fromkeys(_HEAD_DIMS.split(), 8),
    **dict.fromkeys(_INNER.split(), 48),
    **dict.fromkeys(_OF_EXPERTS.split(), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("depth", "num_lstm_layers", "conf_num_hidden_layers"), 2),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    **dict.fromkeys(("base_channels", "mamba_d_ssm"), 64),
    "rotary_dim": 4,
}
"""The most that a size may be, by its name in configurations."""

WITH_TOWERS = {
    **{name: {"vision_config": {"model_type": f"{name}_vision"}} for name in ("gemma4", "gemma4_unified")},
}
"""Kinds that have no tower by default."""

DROPPED = object()
"""In the place of a value: the configuration makes it of others."""


def _sections(*lengths: int, **more: Any) -> dict[str, Any]:
    """Return positions of three axes, in so many frequencies each."""
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(lengths), **more}
    }


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "num_hidden_layers": 4}
_INDEXER = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
    **{"indexer_compress_ratio": 2, "num_hidden_layers": 4, "layer_types": DROPPED},
}
_OF_AXES = {"text_config": _sections(2, 1, 1)}
_IMAGE = {"vocabulary_map": {"<image>": 120}}

OWN: dict[str, Any] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "layers_block_type": DROPPED},
    "chameleon": _IMAGE,
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    },
    "dory": {
        **{"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
        "layer_types": DROPPED,
    },
    "emu3": _IMAGE,
    "ernie4_5_vl_moe": {"text_config": _sections(1, 1, 2)},
    **dict.fromkeys(("glm46v", "glm4v", "glmga", "paddleocr_vl"), _OF_AXES),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"), _OF_AXES),
    "glm4v_moe": {"text_config": _sections(1, 1, 0, partial_rotary_factor=0.5)},
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "index_kpool": 8}},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": DROPPED, "layer_types": DROPPED},
    "jamba": {
        **{"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
        **{"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 4},
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "reformer": {
        **{"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "attention_head_size": 8},
        **{"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    },
    "step3p7": {"text_config": {"sliding_window": 8}},
    "zamba": {
        **{"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "num_key_value_heads": 4},
        **{"attention_head_dim": 16, "attention_hidden_size": 64},
        **{"layers_block_type": DROPPED, "layer_types": DROPPED},
    },
    "zamba2": {
        **{"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "n_mamba_heads": 8},
        **{"mamba_headdim": 8, "n_groups": 1},
        **{"num_key_value_heads": 4, "attention_head_dim": 16, "attention_hidden_size": 64},
        **{"hybrid_layer_ids": [1, 3], "mamba_ngroups": 1, "num_mem_blocks": 1, "adapter_rank": 8},
        **{"layers_block_type": ["mamba", "hybrid"] * 2, "layer_types": DROPPED},
    },
    **{name: {"unpadded_vocab_size": 128} for name in ("inkling2_text", "inkling2_loop_text")},
    **{name: {"text_config": {"unpadded_vocab_size": 128}} for name in ("inkling2", "inkling2_loop")},
}
"""What a kind needs beside the sizes of all."""


def kinds() -> dict[str, type[PretrainedConfig]]:
    """Return the configurations of all causal language models, and of all for images and text, by type."""
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return {name: CONFIG_MAPPING[name] for name in sorted(names)}


def class_of(kind: type[PretrainedConfig]) -> type[PreTrainedModel]:
    """Return the whole class of a configuration: that for images and text, if there is one."""
    has_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    found: Any = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if has_images else MODEL_FOR_CAUSAL_LM_MAPPING)[kind]
    first: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return first


def tiny_config(name: str, **own: Any) -> PretrainedConfig:
    """Make a tiny configuration of a type, without dropout.

    Args:
        name: The type, as `model_type` of a config.json names it.
        **own: Values that it gets beside its own ones.
    """
    kind = CONFIG_MAPPING[name]
    values = kind(**COMPLETED.get(name, {}), **WITH_TOWERS.get(name, {})).to_dict()
    way = small._WAYS[0]
    few = small._shrunk(values, way, small._divisor(values, way))
    made: PretrainedConfig = kind(
        **_merged(few if name in AS_DIVIDED else _merged(_tiny(few), OWN.get(name, {})), own)
    )
    for part in _parts(made):
        for key, value in part.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    return made


def tiny_model(name: str, **own: Any) -> PreTrainedModel:
    """Make a tiny model of a type, in fp32, in training mode, whose values all differ."""
    config = tiny_config(name, **own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = class_of(type(config))._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    trained: PreTrainedModel = model.train()
    return trained


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a configuration and those inside of it."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            yield from _parts(part)


def _tiny(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration with the sizes of all."""
    return {name: _sized(name, value) for name, value in values.items()}


def _sized(name: Any, value: Any) -> Any:
    if name == "per_layer_config":  # layers that differ from the others, which the sizes of all would undo
        return {
            n: {**_tiny(own), **{key: 16 for key in own if key == "head_dim"}} for n, own in value.items()
        }
    if isinstance(value, dict):
        return value if name in ("id2label", "label2id") else _tiny(value)
    if name == "mrope_section" and value is not None:
        return [2, 1, 1]
    if name not in SIZES:
        return value
    most = SIZES[name]
    if name == "head_dim" and small._is_size(value):  # in all parts, whatever their width was divided by
        return most
    if isinstance(value, list) and all(map(small._is_size, value)):
        return [min(each, most) for each in value]
    return min(value, most) if small._is_size(value) else value


def _merged(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with others in their place, those inside of them too."""
    inner = {
        name: _merged(values[name] if isinstance(values.get(name), dict) else {}, value)
        if isinstance(value, dict)
        else value
        for name, value in own.items()
    }
    return {name: value for name, value in {**values, **inner}.items() if value is not DROPPED}
