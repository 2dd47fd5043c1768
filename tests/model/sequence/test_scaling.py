"""A scaling of rotary embeddings is in the configuration as transformers has it, or is refused."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen2VLConfig

from megatrain.config.rope import read_rope_scaling
from megatrain.errors import ConfigError
from megatrain.model.sequence.range import row_range
from megatrain.model.sequence.scaling import require_scaled, scale_rope
from megatrain.model.weights.skeleton import build_skeleton
from tests.families import FAMILIES, MAX_POSITIONS
from tests.kinds import tiny_config

YARN = {"rope_type": "yarn", "factor": 4}
LINEAR = {"rope_type": "linear", "factor": 4}


def scaled(config: PretrainedConfig, scaling: dict[str, Any]) -> Any:
    scale_rope(config, scaling)
    return config


def frequencies(config: PretrainedConfig, name: str = "inv_freq") -> torch.Tensor:
    """Return the frequencies with which a model of a configuration computes."""
    model = build_skeleton(config, dtype=torch.bfloat16)
    (found,) = {
        id(each): each for key, each in model.named_buffers() if key.endswith(f"rotary_emb.{name}")
    }.values()
    assert found.dtype == torch.float32
    return found


def test_yarn_is_written_with_the_longer_range() -> None:
    config = scaled(FAMILIES["llama"](), YARN)
    assert config.max_position_embeddings == 4 * MAX_POSITIONS
    assert config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": MAX_POSITIONS,
    }
    rows = row_range(config)
    assert (rows.native, rows.longest, rows.scaling) == (MAX_POSITIONS, 4 * MAX_POSITIONS, "yarn, factor 4")


def test_linear_is_written_with_the_range_before() -> None:
    """`max_position_embeddings` times `factor` is the range for those who read such a configuration."""
    config = scaled(FAMILIES["llama"](), LINEAR)
    assert config.max_position_embeddings == MAX_POSITIONS
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    assert row_range(config).longest == 4 * MAX_POSITIONS
    assert torch.equal(frequencies(config), frequencies(FAMILIES["llama"]()) / 4)


def test_yarn_s_frequencies_are_those_of_the_paper() -> None:
    """High frequencies stay, low ones are divided by the factor, and between them runs a ramp (3.2)."""
    config = LlamaConfig(
        **{"hidden_size": 128, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8},
        **{"vocab_size": 8, "max_position_embeddings": 4096},
    )
    plain = frequencies(copy.deepcopy(config)).double()
    found = frequencies(scaled(config, YARN)).double()

    def dimension(rotations: float) -> float:
        return 128 * math.log(4096 / (rotations * 2 * math.pi)) / (2 * math.log(1e4))

    low, high = math.floor(dimension(32)), math.ceil(dimension(1))
    ramp = ((torch.arange(64).double() - low) / (high - low)).clamp(0, 1)
    torch.testing.assert_close(found, plain * (1 - ramp) + plain / 4 * ramp, rtol=1e-6, atol=0)
    assert found[0] == plain[0]
    assert found[-1] == plain[-1] / 4


def test_parameters_of_yarn_are_kept_by_transformers_names() -> None:
    given = {
        **YARN,
        "original_max_position_embeddings": 32,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    }
    given |= {"attention_factor": 1, "mscale": 1, "mscale_all_dim": 0.5}
    config = scaled(FAMILIES["llama"](), given)
    assert config.max_position_embeddings == 128, "32 x 4"
    assert config.rope_parameters == {**given, "rope_theta": 10000.0}
    assert build_skeleton(config, dtype=torch.float32).model.rotary_emb.attention_scaling == 1.0


@pytest.mark.parametrize("scaling", [YARN, LINEAR])
def test_layers_with_full_attention_alone_are_scaled_where_kinds_differ(scaling: dict[str, Any]) -> None:
    plain, config = FAMILIES["gemma3_text"](), scaled(FAMILIES["gemma3_text"](), scaling)
    assert isinstance(config, Gemma3TextConfig)
    assert config.rope_parameters["sliding_attention"] == plain.rope_parameters["sliding_attention"]
    assert config.rope_parameters["full_attention"]["rope_type"] == scaling["rope_type"]
    assert config.max_position_embeddings == row_range(config).longest == 4 * MAX_POSITIONS
    name = "sliding_attention_inv_freq"
    assert torch.equal(frequencies(config, name), frequencies(plain, name))
    name = "full_attention_inv_freq"
    assert not torch.equal(frequencies(config, name), frequencies(plain, name))
    if scaling is YARN:
        assert "positions are scaled in layers with full attention (yarn" in row_range(config).notes(65)[0]


def test_positions_with_axes_and_parts_of_heads_keep_them() -> None:
    config = Qwen2VLConfig(text_config={"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}})
    parameters = scaled(config, YARN).text_config.rope_parameters
    assert parameters["mrope_section"] == [16, 24, 24]
    assert parameters["rope_type"] == parameters["type"] == "yarn"
    phi = scaled(FAMILIES["phi"](), YARN)
    assert phi.rope_parameters["partial_rotary_factor"] == 0.5
    assert frequencies(phi).shape == (2,), "of 8 numbers of a head, 4 are turned"


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_neox", "glm4", "qwen3_vl", "gemma3"]
)
@pytest.mark.parametrize("scaling", [YARN, LINEAR])
def test_what_is_written_is_read_again_and_computed(name: str, scaling: dict[str, Any]) -> None:
    config = scaled(tiny_config(name), scaling)
    again = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    assert row_range(again) == row_range(config)
    before = again.to_dict()
    scale_rope(again, scaling)  # a run that goes on from its own checkpoint
    assert again.to_dict() == before
    require_scaled(build_skeleton(again, dtype=torch.float32), scaling)


REFUSED = [
    ({"rope_type": "yarn", "factor": 0.5}, r"factor is 0\.5; use 1 or more"),
    ({"rope_type": "yarn"}, "it has no factor"),
    ({"factor": 2}, "it has no rope_type; use rope_type: yarn or rope_type: linear"),
    ({"rope_type": "yarn", "type": "linear", "factor": 2}, "it has a rope_type and another type"),
    ({"rope_type": "dynamic", "factor": 2}, "rope_type is 'dynamic'; use yarn or linear"),
    ({"rope_type": ["yarn"], "factor": 2}, "rope_type is .* use yarn or linear"),
    ({**LINEAR, "beta_fast": 8}, "beta_fast is not a parameter of rope_type linear, which has factor"),
    ({**YARN, "factor": float("nan")}, "factor is nan; use a number above 0"),
    ({**YARN, "factor": 10**400}, "use a number above 0"),
    ({**YARN, "factor": True}, "factor is True; use a number above 0"),
    ({**YARN, "beta_fast": 1, "beta_slow": 2}, "beta_fast is 1 and beta_slow is 2"),
    ({**YARN, "truncate": 1}, "truncate is 1; use true or false"),
    ({**YARN, "original_max_position_embeddings": 1.5}, "use a whole number of tokens"),
    ("yarn", "it must be a mapping such as"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED)
def test_impossible_scalings_are_refused(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_rope_scaling(given)


@pytest.mark.parametrize(
    ("name", "scaling", "why"),
    [
        ("gpt2", YARN, "the gpt2 model has no rotary embeddings; leave rope_scaling out"),
        ("bloom", YARN, "the bloom model has no rotary embeddings"),
        ("mamba2", LINEAR, "the mamba2 model has no rotary embeddings"),
        ("falcon_alibi", YARN, "the falcon model has no rotary embeddings"),
        ("granitemoehybrid", YARN, "the granitemoehybrid model computes no rotary embeddings with it"),
        ("gpt_oss", YARN, r"another way: rope_type yarn, factor .*original_max_position_embeddings 16"),
        (
            "llama",
            {**YARN, "original_max_position_embeddings": 65},
            "original_max_position_embeddings 65, but the llama model has max_position_embeddings 64",
        ),
    ],
)
def test_models_that_cannot_be_scaled_so_are_refused(name: str, scaling: dict[str, Any], why: str) -> None:
    config = FAMILIES[name]() if name in FAMILIES else tiny_config(name)
    with pytest.raises(ConfigError, match=why):
        require_scaled(build_skeleton(scaled(config, scaling), dtype=torch.float32), scaling)


def test_another_scaling_on_top_is_refused_and_said() -> None:
    config = scaled(FAMILIES["llama"](), YARN)
    for other in ({**YARN, "factor": 2}, LINEAR, {**YARN, "beta_fast": 16}):
        with pytest.raises(ConfigError, match=r"another way: rope_type yarn, factor 4\.0, original"):
            scale_rope(config, other)


@pytest.mark.parametrize(
    ("name", "why"), [("phi3", "its configuration refuses it"), ("deepseek_v4", "for main, compress")]
)
def test_configurations_that_would_not_be_read_again_are_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        scale_rope(tiny_config(name), YARN)
