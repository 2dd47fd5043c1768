"""A model's context: found under every name that it has, and kept to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatrain.data.context import check_seq_len, context_length, has_rotary_positions
from megatrain.errors import ConfigError


def test_sequences_beyond_the_context_are_refused() -> None:
    config = SimpleNamespace(max_position_embeddings=512)
    check_seq_len(512, context_length(config))
    with pytest.raises(ConfigError, match=r"data\.seq_len 513 .* context of 512 tokens; use 512 or less"):
        check_seq_len(513, context_length(config))


def test_models_that_turn_by_positions_are_told_from_those_that_learn_them() -> None:
    from transformers import BloomConfig, Gemma3Config, GPT2Config, LlamaConfig

    assert [has_rotary_positions(config) for config in (LlamaConfig(), Gemma3Config())] == [True, True]
    assert [has_rotary_positions(config) for config in (GPT2Config(), BloomConfig())] == [False, False]


def test_context_is_found_under_its_names() -> None:
    from transformers import BloomConfig, Gemma3Config, GPT2Config, LlamaConfig, MptConfig

    assert context_length(LlamaConfig(max_position_embeddings=77)) == 77
    assert context_length(GPT2Config(n_positions=78)) == 78
    assert context_length(MptConfig(max_seq_len=79)) == 79
    assert context_length(Gemma3Config(text_config={"max_position_embeddings": 80})) == 80
    assert context_length(BloomConfig()) is None  # position biases without a limit
    check_seq_len(10**6, None)
