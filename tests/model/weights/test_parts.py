"""Models with parts beside their language model: refused, or kept whole; never half of one in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    Gemma3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from megatrain.errors import ModelError
from megatrain.model import small
from megatrain.model.weights.parts import refuse_parts
from megatrain.model.weights.skeleton import build_skeleton, read_config
from tests.model.resident import load_bound, random_model
from tests.model.test_causal import NOT_BUILT
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
HALVES: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "qwen3_5": (lambda: Qwen3_5Config(text_config=TEXT, vision_config=_VISION), "vision_config"),
    "qwen2_5_vl": (lambda: Qwen2_5_VLConfig(text_config=TEXT), "vision_config"),
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
    refuse_parts(Qwen3_5Config(text_config=TEXT).text_config)
    refuse_parts(BartConfig(vocab_size=128, d_model=32, is_encoder_decoder=False))
    refuse_parts(gemma3())


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


def test_a_model_that_is_whole_keeps_its_tower(tmp_path: Path) -> None:
    assert kept_whole(gemma3(), tmp_path) == 104


WHOLE = {
    "blt", "dbrx", "fuyu", "gemma3", "gemma4", "gemma4_unified", "git", "got_ocr2", "moshi",
    "moss_transcribe_diarize", "mpt", "phi4_multimodal",
}  # fmt: skip
REFUSED = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "dots3_note", "emu3", "llama4", "marian",
    "mbart", "mllama", "mvp", "pegasus", "plbart", "prophetnet", "qwen3_5", "qwen3_5_moe", "whisper",
}  # fmt: skip
UNKNOWN = {"gemma3n", "gemma4_unified_assistant"}
"""One wants a package for its tower, the other takes no words of its own."""


@pytest.mark.parity
def test_every_kind_with_parts_is_refused_or_kept_whole(tmp_path: Path) -> None:
    refused, whole = set(), set()
    for kind in {*MODEL_FOR_CAUSAL_LM_MAPPING, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING}:
        name, is_causal = kind.model_type, kind in MODEL_FOR_CAUSAL_LM_MAPPING
        if name in NOT_BUILT | UNKNOWN or not (is_causal or kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
            continue
        given = {"attn_config": {"kv_n_heads": 8, "rope_theta": 5e5}} if name == "dbrx" else {}
        try:
            refuse_parts(kind(**given))
        except ModelError:
            refused |= {name} & {each.model_type for each in MODEL_FOR_CAUSAL_LM_MAPPING}
            continue
        assert is_causal, name
        if kind.sub_configs:
            values, way = kind(**given).to_dict(), small._WAYS[0]
            config = kind(**small._shrunk(values, way, small._divisor(values, way)))
            assert kept_whole(config, tmp_path / name) > 10
            whole.add(name)
    assert (whole, refused) == (WHOLE, REFUSED)
