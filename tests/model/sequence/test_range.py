"""The range of a model's rows is what its configuration says, as transformers' positions read it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    MptConfig,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2VLConfig,
)

from megatrain.errors import ConfigError
from megatrain.model.sequence.range import OF_LOAD, RowRange, check_row, row_range

_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def llama(longest: int = 8192, **rope: Any) -> PretrainedConfig:
    return LlamaConfig(max_position_embeddings=longest, rope_parameters={"rope_theta": 1e4, **rope})


def of_kinds(longest: int, **full: Any) -> PretrainedConfig:
    parameters = {"sliding_attention": _DEFAULT, "full_attention": {"rope_theta": 1e6, **full}}
    return Gemma3TextConfig(max_position_embeddings=longest, rope_parameters=parameters)


RANGES: dict[str, tuple[PretrainedConfig, int | None, int | None]] = {
    "default": (llama(77), 77, 77),
    "of a language model inside": (Gemma3Config(text_config={"max_position_embeddings": 80}), 80, 80),
    "axes": (
        Qwen2VLConfig(
            text_config={
                "max_position_embeddings": 81,
                "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            }
        ),
        81,
        81,
    ),
    "a part of each head": (PhiConfig(max_position_embeddings=82, partial_rotary_factor=0.5), 82, 82),
    "linear": (llama(4096, rope_type="linear", factor=4.0), 4096, 16384),
    "dynamic": (llama(4096, rope_type="dynamic", factor=2.5), 4096, 10240),
    "YaRN as Qwen's cards have it": (
        llama(32768, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
        32768,
        131072,
    ),
    "YaRN with the longer range": (
        llama(131072, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096),
        4096,
        131072,
    ),
    "YaRN without a factor": (
        llama(16384, rope_type="yarn", factor=None, original_max_position_embeddings=4096),
        4096,
        16384,
    ),
    "YaRN of heads with parts": (
        DeepseekV3Config(
            max_position_embeddings=163840,
            rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        ),
        4096,
        163840,
    ),
    "llama3": (
        llama(
            131072,
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        8192,
        131072,
    ),
    "longrope, whose range is beside it": (
        Phi3Config(
            hidden_size=64,
            num_attention_heads=4,
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            rope_scaling={"type": "longrope", **_LONG},
        ),
        4096,
        131072,
    ),
    "kinds of layers, unscaled": (of_kinds(32768, rope_type="default"), 32768, 32768),
    "kinds of layers, with the longer range": (
        of_kinds(131072, rope_type="linear", factor=8.0),
        131072,
        131072,
    ),
    "kinds of layers, YaRN": (
        Olmo3Config(
            max_position_embeddings=65536,
            rope_parameters={
                "sliding_attention": dict(_DEFAULT),
                "full_attention": {
                    **{"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0},
                    "original_max_position_embeddings": 8192,
                },
            },
        ),
        8192,
        65536,
    ),
    "a table of positions": (GPT2Config(n_positions=78), 78, 78),
    "a table with an offset": (OPTConfig(max_position_embeddings=79), 79, 79),
    "biases with a limit": (MptConfig(max_seq_len=83), 83, 83),
    "biases without one": (BloomConfig(), None, None),
    "no positions": (Mamba2Config(), None, None),
}


@pytest.mark.parametrize("name", RANGES)
def test_range_is_the_configuration_s(name: str) -> None:
    config, native, longest = RANGES[name]
    rows = row_range(config)
    assert (rows.native, rows.longest) == (native, longest)
    again = row_range(type(config).from_dict(config.to_dict()))
    assert again == rows, "as config.json has it"


def test_rows_beyond_the_range_are_refused_with_the_way_out() -> None:
    rows = row_range(llama(512))
    check_row(512, rows)
    with pytest.raises(
        ConfigError, match=r"^data\.seq_len 513 is beyond the model's context of 512 tokens; "
    ):
        check_row(513, rows)
    with pytest.raises(
        ConfigError, match=r"use 512 or less, or model\.rope_scaling='{rope_type: yarn, factor: 4}'$"
    ):
        check_row(1537, rows)
    with pytest.raises(
        ConfigError, match=r"^batch\.seq_len .*load\(\.\.\., rope_scaling={'rope_type': 'yarn', 'fa"
    ):
        check_row(513, rows, named="batch.seq_len {seq_len}", extends=OF_LOAD)


def test_rows_beyond_a_scaled_range_are_refused_with_the_factor_that_is_enough() -> None:
    rows = row_range(llama(512, rope_type="linear", factor=2.0))
    check_row(1024, rows, is_set=True)
    with pytest.raises(
        ConfigError, match=r"context of 1024 tokens \(linear, factor 2\); use 1024 or less, .*factor: 3"
    ):
        check_row(1025, rows, is_set=True)
    # what the model itself has, a setting cannot change
    with pytest.raises(ConfigError, match=r"\(linear, factor 2\); use 1024 or less$"):
        check_row(1025, rows)


def test_models_without_rotary_embeddings_have_no_way_to_longer_rows() -> None:
    with pytest.raises(ConfigError, match=r"context of 78 tokens; use 78 or less$"):
        check_row(79, row_range(GPT2Config(n_positions=78)))
    check_row(10**9, row_range(BloomConfig()))


def test_notes_say_from_where_on_positions_are_scaled() -> None:
    rows = row_range(llama(131072, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096))
    assert rows.notes(4096) == []
    (note,) = rows.notes(4097)
    assert "rows of 4,097 tokens are longer than the 4,096" in note
    assert "(yarn, factor 32), for up to 131,072 tokens" in note
    assert "full attention" not in note
    assert RowRange(native=None, longest=None).notes(10**9) == []


def test_range_needs_no_torch() -> None:
    code = "import sys, megatrain.model.sequence.scaling; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
