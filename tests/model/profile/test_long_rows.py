"""Rows of up to two million tokens are counted as short ones are: by the same operations, to the formula."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig, PretrainedConfig

from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.recipes import shapes

SHORT, LONG = 1 << 17, 1 << 21


def shape(name: str) -> PretrainedConfig:
    """Return a shape of the package with two layers."""
    values = json.loads(shapes()[name].read_text())
    return AutoConfig.for_model(**values | {"num_hidden_layers": 2})


def count(config: PretrainedConfig, seq_len: int) -> Anatomy:
    return count_anatomy(config, micro_batch_size=1, seq_len=seq_len, precision="bf16")


@pytest.mark.parametrize("name", ["llama-8b", pytest.param("qwen-32b", marks=pytest.mark.parity)])
def test_two_million_tokens_are_counted_to_the_formula(name: str) -> None:
    """Causal attention: two products of 2 FLOPs, for each of T queries T / 2 keys; 2.5 times that backward.

    All else grows with the tokens, the bytes too: nothing has a matrix of T x T.
    """
    config = shape(name)
    short, long = count(config, SHORT), count(config, LONG)
    times = LONG // SHORT
    width = config.num_attention_heads * long.head_dim
    for before, after in zip(short.layers, long.layers, strict=True):
        assert after.forward.attention_flops == pytest.approx(2 * LONG**2 * width, rel=1e-6)
        assert after.backward.attention_flops == pytest.approx(5 * LONG**2 * width, rel=1e-6)
        assert before.forward.attention_flops == pytest.approx(2 * SHORT**2 * width, rel=1e-5)
        assert after.forward.matmul_flops == times * before.forward.matmul_flops
        assert after.backward.matmul_flops == times * before.backward.matmul_flops
        params = sum(part.num_params for part in after.fragments)
        assert after.forward.matmul_flops == pytest.approx(2 * LONG * params, rel=1e-3)
        assert after.boundary_bytes == times * before.boundary_bytes == LONG * config.hidden_size * 2
        for policy, nbytes in after.backward_peak_bytes.items():
            assert nbytes / before.backward_peak_bytes[policy] == pytest.approx(times, rel=0.03)
            assert nbytes > 1 << 36  # of one layer, in more than 32 bits
        assert after.forward.num_operations == before.forward.num_operations
        assert after.backward.num_operations == before.backward.num_operations
    assert long.head_forward.matmul_flops == pytest.approx(times * short.head_forward.matmul_flops, rel=1e-3)
    of_layers = sum(layer.forward.attention_flops for layer in long.layers)
    shorter = sum(layer.forward.attention_flops for layer in short.layers)
    per_token = 3 * (of_layers / LONG - shorter / SHORT)  # PaLM's count: the backward is twice the forward
    assert long.model_flops_per_token - short.model_flops_per_token == pytest.approx(per_token, rel=1e-3)
