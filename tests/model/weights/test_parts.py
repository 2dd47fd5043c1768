"""Models with parts beside their language model: whole, with towers that are frozen, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BartConfig,
    Blip2Config,
    Gemma3Config,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    PI0Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megatrain.config.adaptation import Adaptation, LoraChoice
from megatrain.errors import ModelError
from megatrain.model.adapters.adapt import adapt
from megatrain.model.weights.parts import maker_of
from megatrain.model.weights.skeleton import build_skeleton, read_config
from tests.model.resident import load_bound, random_model
from tests.model.test_causal import COMPLETED, NOT_BUILT
from tests.model.weights.test_export import export, tensors_of

TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def gemma3(**tower: Any) -> Gemma3Config:
    """Make a tiny configuration whose causal language model is the whole, with its tower for images."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Gemma3Config(
        text_config={**TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
        vision_config={**vision, "image_size": 28, "patch_size": 14, **tower},
        mm_tokens_per_image=4,
        image_token_index=125,
        boi_token_index=126,
        eoi_token_index=127,
    )


_VISION = {"hidden_size": 16, "intermediate_size": 16, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
_IDS = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_IMAGES = {"image_size": 28, "patch_size": 14}


def _sections(*lengths: int) -> dict[str, Any]:
    """Return positions of three axes, time, height and width, in so many frequencies each."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(lengths)}}


IMAGES_AND_TEXT: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={**TEXT, **_sections(1, 1, 2)}, vision_config=_VISION, **_IDS
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, **_sections(2, 1, 1)},
        vision_config={**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **_IDS,
    ),
    "qwen3_5": lambda: Qwen3_5Config(
        text_config={
            **TEXT,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        vision_config={**_VISION, "num_position_embeddings": 16},
        **_IDS,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={"model_type": "mistral", **TEXT, "head_dim": 8},
        vision_config={"model_type": "pixtral", "head_dim": 8, **_TOWER, **_IMAGES},
        image_token_index=120,
    ),
    "llava": lambda: LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **_TOWER, **_IMAGES},
        image_token_index=120,
    ),
}
"""Configurations whose causal language model, if there is one, lacks the tower for images."""

HALVES: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "bart": (lambda: BartConfig(vocab_size=128, d_model=32), "an encoder: is_encoder_decoder"),
    "llama": (
        lambda: LlamaConfig(**TEXT, architectures=["SomeForConditionalGeneration"]),
        "SomeForConditionalGeneration",
    ),
}


@pytest.mark.parametrize("kind", HALVES)
def test_a_model_of_which_a_part_would_be_lost_is_refused(kind: str, tmp_path: Path) -> None:
    make, part = HALVES[kind]
    make().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="parts beside its causal language model") as read:
        read_config(tmp_path)
    with pytest.raises(ModelError, match="parts beside its causal language model") as built:
        build_skeleton(make(), dtype=torch.float32)
    assert str(read.value) == f"{tmp_path}: {built.value}"
    assert f"({part})" in str(read.value)
    assert "\n" not in str(read.value)


def test_a_text_model_of_such_a_kind_is_not_refused() -> None:
    assert maker_of(Qwen3_5Config(text_config=TEXT).text_config) is AutoModelForCausalLM
    assert maker_of(BartConfig(vocab_size=128, d_model=32, is_encoder_decoder=False)) is AutoModelForCausalLM
    assert maker_of(gemma3()) is AutoModelForCausalLM
    assert maker_of(Qwen3_5Config(text_config=TEXT, vision_config=_VISION)) is AutoModelForImageTextToText


@pytest.mark.parametrize(("make", "needed"), [(Blip2Config, "pixel_values"), (PI0Config, "state")])
def test_a_class_that_needs_more_than_text_is_refused(make: type[PretrainedConfig], needed: str) -> None:
    with pytest.raises(ModelError, match=f"takes no rows of text alone, .*: it needs {needed} too"):
        maker_of(make())


def kept_whole(config: PretrainedConfig, directory: Path) -> int:
    """Save, load and export a model; hold every tensor and its kind, and return how many there are."""
    random_model(config).save_pretrained(directory / "source")
    model, _ = load_bound(directory / "source", read_config(directory / "source"), torch.float32)
    export(model, directory / "out")
    expected, actual = tensors_of(directory / "source"), tensors_of(directory / "out")
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key
    kinds = [json.loads((directory / side / "config.json").read_text()) for side in ("source", "out")]
    assert kinds[0]["model_type"] == kinds[1]["model_type"]
    assert kinds[0]["architectures"] == kinds[1]["architectures"]
    return len(expected)


@pytest.mark.parametrize("kind", IMAGES_AND_TEXT)
def test_a_model_for_images_and_text_is_kept_whole_with_its_towers_frozen(kind: str, tmp_path: Path) -> None:
    config = IMAGES_AND_TEXT[kind]()
    assert kept_whole(config, tmp_path) > 50
    model = build_skeleton(config, dtype=torch.float32)
    assert type(model).__name__.endswith("ForConditionalGeneration")
    frozen = {name.split(".")[1] for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen <= {"visual", "vision_tower", "multi_modal_projector"}
    trained = {name.split(".")[1] for name, value in model.named_parameters() if value.requires_grad}
    assert trained <= {"language_model", "weight"}, "and the head, where it is not tied"
    assert "language_model" in trained


@pytest.mark.parametrize("make", [IMAGES_AND_TEXT["qwen3_vl"], gemma3], ids=["qwen3_vl", "gemma3"])
def test_adapters_are_put_into_the_language_model_alone(make: Callable[[], PretrainedConfig]) -> None:
    model = build_skeleton(make(), dtype=torch.float32)
    adapt(model, Adaptation(lora=LoraChoice(r=2, alpha=4.0)))
    adapted = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(adapted) == 2 * 7 * 4
    assert all(name.startswith("model.language_model.layers.") for name in adapted)


def test_a_language_model_with_a_tower_keeps_it_frozen(tmp_path: Path) -> None:
    assert kept_whole(gemma3(), tmp_path) == 104
    model = build_skeleton(gemma3(), dtype=torch.float32)
    frozen = {name.split(".")[1] for name, value in model.named_parameters() if not value.requires_grad}
    assert frozen == {"vision_tower", "multi_modal_projector"}


ENCODER_DECODERS = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus",
    "plbart", "prophetnet", "whisper",
}  # fmt: skip
"""Types with a causal language model that is a half of them; what is refused beside them is in
`tests/stream/test_every_class.py`."""


@pytest.mark.parity
def test_every_encoder_with_a_decoder_is_refused_by_name() -> None:
    refused = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = kind(**COMPLETED.get(kind.model_type, {})) if kind.model_type not in NOT_BUILT else None
        if config is None or not config.is_encoder_decoder or config.sub_configs:
            continue
        with pytest.raises(ModelError, match="an encoder: is_encoder_decoder"):
            maker_of(config)
        refused.add(kind.model_type)
    assert refused == ENCODER_DECODERS
