"""The most used open families, each with the type and the class by which transformers knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models."""

    name: str
    """The name that people know."""
    model_type: str
    """The `model_type` of its config.json."""
    kind: str
    """How it is made: dense or of experts; hybrid, where layers carry a state from token to token; towers."""


FAMILIES = tuple(
    Family(*row)
    for row in (
        ("Llama 2, 3", "llama", "dense"),
        ("Mistral 7B, Nemo, Small", "mistral", "dense"),
        ("Qwen2, Qwen2.5", "qwen2", "dense"),
        ("Qwen3", "qwen3", "dense"),
        ("Gemma 2", "gemma2", "dense"),
        ("Gemma 3 (text)", "gemma3_text", "dense"),
        ("Gemma 4 (text)", "gemma4_text", "dense"),
        ("Phi-3, Phi-4", "phi3", "dense"),
        ("OLMo 2", "olmo2", "dense"),
        ("OLMo 3", "olmo3", "dense"),
        ("Granite 3", "granite", "dense"),
        ("GLM-4", "glm4", "dense"),
        ("SmolLM3", "smollm3", "dense"),
        ("Command R7B, Command A", "cohere2", "dense"),
        ("EXAONE 4", "exaone4", "dense"),
        ("Seed-OSS", "seed_oss", "dense"),
        ("ERNIE 4.5 (dense)", "ernie4_5", "dense"),
        ("Hunyuan (dense)", "hunyuan_v1_dense", "dense"),
        ("Mixtral", "mixtral", "experts"),
        ("Qwen3 MoE", "qwen3_moe", "experts"),
        ("gpt-oss", "gpt_oss", "experts"),
        ("DeepSeek-V3, R1; Kimi K2", "deepseek_v3", "experts"),
        ("DeepSeek-V3.2", "deepseek_v32", "experts"),
        ("GLM-4.5, 4.6, 4.7", "glm4_moe", "experts"),
        ("OLMoE", "olmoe", "experts"),
        ("ERNIE 4.5", "ernie4_5_moe", "experts"),
        ("Hunyuan A13B", "hunyuan_v1_moe", "experts"),
        ("MiniMax-M2", "minimax_m2", "experts"),
        ("Llama 4 (text)", "llama4_text", "experts"),
        ("Qwen3-Next", "qwen3_next", "hybrid, experts"),
        ("Granite 4", "granitemoehybrid", "hybrid, experts"),
        ("Nemotron-H, Nemotron 3", "nemotron_h", "hybrid, experts"),
        ("Jamba", "jamba", "hybrid, experts"),
        ("Falcon-H1", "falcon_h1", "hybrid"),
        ("LFM2", "lfm2", "hybrid"),
        ("Zamba2", "zamba2", "hybrid"),
        ("Gemma 3", "gemma3", "dense, towers"),
        ("Gemma 4", "gemma4", "dense, towers"),
        ("Qwen2.5-VL", "qwen2_5_vl", "dense, towers"),
        ("Qwen3-VL", "qwen3_vl", "dense, towers"),
        ("Mistral Small 3.1, 3.2", "mistral3", "dense, towers"),
        ("InternVL 3", "internvl", "dense, towers"),
        ("Kimi K2.5", "kimi_k25", "experts, towers"),
        ("Qwen3.5", "qwen3_5", "hybrid, towers"),
        ("Qwen3.5 MoE", "qwen3_5_moe", "hybrid, experts, towers"),
    )
)
"""From dense to hybrid, and with towers at last."""
