"""FLOPs of a token, counted by hand for each kind of layer."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatrain.model.profile.flops import ModelFlops, count_flops, mean_keys
from tests.families import FAMILIES
from tests.kinds import tiny_config
from tests.reference import attach_plainly, make_model

SEQ = 16


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count(family: str, layers: str = "model.layers") -> ModelFlops:
    model = meta_model(FAMILIES[family]())
    return count_flops(model, list(model.get_submodule(layers)))


def attention(width: int, keys: float) -> float:
    """Two products of 2 FLOPs per element and key; three times that with the backward."""
    return 12.0 * width * keys


def test_llama_counts_the_head_and_not_the_embedding() -> None:
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32  # q and o, k and v, mlp, norms
    found = count("llama")
    assert [part.active for part in found.layers] == [layer] * 4
    assert found.rest.active == 32 + 128 * 32
    assert found.model_flops(SEQ) == 6 * (4 * layer + 32 + 128 * 32) + 4 * attention(32, SEQ / 2)
    assert found.head_flops == 2 * 128 * 32


def test_tied_embedding_counts_once_as_the_head() -> None:
    biases = 32 + 16 + 16 + 32 + 48 + 48 + 32
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32 + biases
    found = count("llama_tied")
    assert found.rest.active == 32 + 128 * 32
    assert found.model_flops(SEQ) == 6 * (4 * layer + 32 + 128 * 32) + 4 * attention(32, SEQ / 2)


def test_positions_are_a_lookup() -> None:
    found = count("gpt2", "transformer.h")
    assert found.rest.active == 2 * 32 + 128 * 32  # the last norm, and the tied head; not wpe
    assert found.layers[0].attention is not None
    assert found.layers[0].attention.key_width == 32


def test_mixtral_counts_active_experts_and_its_window() -> None:
    router = 4 * 32
    experts = 4 * 3 * 32 * 48
    shared = 2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 + router
    found = count("mixtral")
    assert [part.active for part in found.layers] == [shared + experts * 2 / 4] * 4
    keys = 8 - 8 * 8 / (2 * SEQ)  # a window of 8: half of it while the row fills it, all of it after
    rest = 32 + 128 * 32
    layers = 4 * (shared + experts / 2)
    assert found.model_flops(SEQ) == 6 * (layers + rest) + 4 * attention(32, keys)


def test_shared_experts_and_latent_attention_of_deepseek() -> None:
    found = count("deepseek_v3")
    dense, routed = found.layers[0], found.layers[1]
    assert dense.attention is not None
    assert (dense.attention.key_width, dense.attention.value_width) == (4 * 16, 4 * 8)
    expert = 3 * 32 * 16
    assert dense.active - 3 * 32 * 48 == routed.active - (2 + 1) * expert - 8 * 32


def test_gemma2_has_a_window_in_every_other_layer() -> None:
    found = count("gemma2")
    windows = [part.attention.window for part in found.layers if part.attention is not None]
    assert windows == [8, None, 8, None]
    width, layer = 4 * 16, 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48 + 4 * 32
    expected = 6 * (4 * layer + 32 + 128 * 32) + 2 * attention(width, SEQ / 2) + 2 * attention(width, 6)
    assert found.model_flops(SEQ) == expected
    assert found.model_flops(4) == 6 * (4 * layer + 32 + 128 * 32) + 4 * attention(width, 2)


@pytest.mark.parametrize(
    ("family", "layers", "expected"),
    [
        ("jamba", "model.layers", [False, False, True, False]),
        ("qwen3_next", "model.layers", [False, False, True, False]),
        ("mamba2", "backbone.layers", [False] * 4),
        ("opt", "model.decoder.layers", [True] * 4),
        ("bloom", "transformer.h", [True] * 4),
        ("mpt", "transformer.blocks", [True] * 4),
    ],
)
def test_layers_without_attention_have_none(family: str, layers: str, expected: list[bool]) -> None:
    assert [part.attention is not None for part in count(family, layers).layers] == expected


def test_layers_have_heads_of_their_own() -> None:
    """Gemma 4's layers with global attention have larger ones; RWKV has no heads."""
    gemma, rwkv = (meta_model(tiny_config(name)) for name in ("gemma4_text", "rwkv"))
    kinds = gemma.config.layer_types
    found = [part.attention for part in count_flops(gemma, list(gemma.model.layers)).layers]
    heads = gemma.config.num_attention_heads
    assert [each.key_width for each in found if each] == [
        heads * (16 if "full" in kind else 8) for kind in kinds
    ]
    assert {part.attention for part in count_flops(rwkv, list(rwkv.rwkv.blocks)).layers} == {None}


def test_jamba_by_hand() -> None:
    found = count("jamba")
    mamba = 32 * 128 + 64 * 4 + 64 + 64 * (4 + 16) + 4 * 64 + 64 + 64 * 8 + 64 + 64 * 32 + 4 + 8 + 8
    attends = 2 * 32 * 32 + 2 * 32 * 16
    dense, routed, norms = 3 * 32 * 48, 4 * 32 + 2 * 3 * 32 * 48, 2 * 32
    layers = [mamba + dense, mamba + routed, attends + dense, mamba + routed]
    assert [part.active for part in found.layers] == [layer + norms for layer in layers]
    total = sum(layers) + 4 * norms + 32 + 128 * 32
    assert found.model_flops(SEQ) == 6 * total + attention(32, SEQ / 2)


@pytest.mark.parametrize(("seq_len", "window"), [(16, None), (16, 8), (16, 16), (16, 99), (7, 3), (100, 1)])
def test_mean_keys_is_the_average_less_half_a_token(seq_len: int, window: int | None) -> None:
    seen = [min(number + 1, window or seq_len) for number in range(seq_len)]
    width = min(window or seq_len, seq_len)
    assert mean_keys(seq_len, window) == pytest.approx(sum(seen) / seq_len - 0.5 * width / seq_len)


def test_frozen_parameters_cost_no_gradient_of_their_own() -> None:
    model = meta_model(FAMILIES["llama"]())
    layers = list(model.get_submodule("model.layers"))
    whole = count_flops(model, layers).model_flops(SEQ)
    for parameter in layers[1].mlp.parameters():
        parameter.requires_grad_(False)
    assert count_flops(model, layers).model_flops(SEQ) == whole - 2 * 3 * 32 * 48


def test_recomputed_forward_is_a_third_of_a_layer() -> None:
    found = count("llama")
    layers = sum(part.flops(SEQ) for part in found.layers)
    assert found.recomputed_flops(SEQ, [1, 1, 1, 1]) == pytest.approx(layers / 3)
    assert found.recomputed_flops(SEQ, [0, 2, 0, 0]) == pytest.approx(layers / 6)


@pytest.mark.parametrize("family", ["llama_tied", "mixtral", "jamba"])
def test_attached_model_counts_as_the_model_alone(family: str) -> None:
    model = make_model(FAMILIES[family]())
    layers = list(model.get_submodule("model.layers"))
    before = count_flops(model, layers)
    engine = attach_plainly(model)
    assert count_flops(model, engine.arrangement.layer_modules) == before
    engine.detach()


def test_experts_of_unknown_number_are_all_counted_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    model = meta_model(FAMILIES["mixtral"]())
    model.config.num_experts_per_tok = 0
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        found = count_flops(model, list(model.get_submodule("model.layers")))
    assert found.layers[0].active == 2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 + 4 * 32 + 4 * 3 * 32 * 48
    assert "count all of them" in caplog.text
