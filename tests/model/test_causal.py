"""Which models are refused because a token sees those behind it, and which are not although they look so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    ElectraConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXJapaneseConfig,
    MambaConfig,
    PretrainedConfig,
    RobertaConfig,
    XLMConfig,
    XLNetConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megatrain.errors import ModelError
from megatrain.model import small
from megatrain.model.causal import refuse_encoder
from megatrain.model.profile.count import count_anatomy
from megatrain.stream.attach.load import load
from tests.families import FAMILIES

SIZES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}

ENCODERS: dict[str, Callable[[], PretrainedConfig]] = {
    "bert": lambda: BertConfig(**SIZES, intermediate_size=48),
    "bert-base": BertConfig,
    "roberta": lambda: RobertaConfig(**WIDE),
    "electra": lambda: ElectraConfig(**SIZES, embedding_size=16),
    "xlm": lambda: XLMConfig(vocab_size=128, emb_dim=32, n_layers=2, n_heads=4),
    "xlnet": lambda: XLNetConfig(vocab_size=128, d_model=32, n_layer=2, n_head=4, d_inner=48),
    "embedding gemma": lambda: Gemma3TextConfig(**SIZES, head_dim=16, use_bidirectional_attention=True),
}
DECODERS: dict[str, Callable[[], PretrainedConfig]] = {
    "bert": lambda: BertConfig(**SIZES, intermediate_size=48, is_decoder=True),
    "roberta": lambda: RobertaConfig(**WIDE, is_decoder=True),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, intermediate_size=48),
    "gpt_neox_japanese": lambda: GPTNeoXJapaneseConfig(**SIZES),
    "mamba": lambda: MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2),
    **FAMILIES,
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_refused_by_name(name: str) -> None:
    config = ENCODERS[name]()
    with pytest.raises(ModelError, match=f"this {config.model_type} model is an encoder") as caught:
        refuse_encoder(config)
    assert "\n" not in str(caught.value)
    assert ("is_decoder: true" in str(caught.value)) is hasattr(config, "is_decoder")


def test_decoders_go_on_whatever_is_decoder_says() -> None:
    for name in ("gpt_neox", "gpt_neox_japanese"):
        assert DECODERS[name]().is_decoder is False
    for make in DECODERS.values():
        refuse_encoder(make())


def test_an_encoder_is_neither_loaded_nor_counted() -> None:
    config = ENCODERS["bert"]()
    with pytest.raises(ModelError, match="is an encoder"):
        load(config=config)
    with pytest.raises(ModelError, match="is an encoder"):
        count_anatomy(config, micro_batch_size=1, seq_len=16, precision="fp32")


def test_nothing_of_the_caller_s_is_changed() -> None:
    config = DECODERS["gpt_neox"]()
    config.rotary_pct = 0.5  # no other test has asked for this one
    before, state, threads = config.to_dict(), torch.get_rng_state(), torch.get_num_threads()
    refuse_encoder(config)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_what_cannot_be_tried_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(small, "_MOST_PARAMETERS", 0)
    config = FAMILIES["llama"]()
    config.rope_theta = 77.0
    refuse_encoder(config)
    assert "no small model of llama can be made" in caplog.text
    assert "nobody has checked" in caplog.text


REFUSED = {
    "bert", "bert-generation", "big_bird", "camembert", "cpmant", "data2vec-text", "electra", "ernie",
    "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm",
    "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
}  # fmt: skip
"""Of all types of transformers 5.23: encoders, and CPM-Ant, in which tokens of the prompt see each other."""

NOT_BUILT = {"gemma4_assistant", "musicgen", "musicgen_melody", "qwen4_exp", "qwen4_exp_text"}
"""Types whose configuration, or model, cannot be made of defaults by transformers itself."""

_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
COMPLETED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": _ROPE},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 5e5, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 4, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 1, "head_dim": 128, "num_experts_per_tok": 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
"""What the defaults of a type lack, and a real configuration says."""


@pytest.mark.parity
def test_of_all_types_these_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    refused, tried = set(), 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        if kind.model_type in NOT_BUILT:
            continue
        tried += 1
        try:
            refuse_encoder(kind(**COMPLETED.get(kind.model_type, {})))
        except ModelError:
            refused.add(kind.model_type)
    assert "nobody has checked" not in caplog.text
    assert (refused, tried) == (REFUSED, 184)
