from __future__ import annotations

import pytest
import torch
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    OpenAIGPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from megatrain.errors import ModelError
from megatrain.model.weights.initialise import initialise_weights
from megatrain.model.weights.skeleton import build_skeleton
from tests.families import FAMILIES
from tests.model.resident import assert_same_state, bind_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_equal_those_of_a_resident_model(family: str) -> None:
    resident = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    initialise_weights(resident, seed=3)
    bound = bind_parameters(build_skeleton(FAMILIES[family](), dtype=torch.float32))
    initialise_weights(bound, seed=3)
    assert_same_state(bound, resident)


def test_seeds_repeat_and_differ_and_leave_the_random_state_alone() -> None:
    model = bind_parameters(build_skeleton(FAMILIES["llama_tied"](), dtype=torch.float32))
    torch.manual_seed(11)
    state = torch.get_rng_state()
    weights = []
    for seed in (1, 1, 2):
        initialise_weights(model, seed=seed)
        weights.append(model.lm_head.weight.detach().clone())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_in_place_and_of_the_expected_size() -> None:
    """The storage stays, and the weights have the model's own standard deviation."""
    model = bind_parameters(build_skeleton(FAMILIES["mixtral"](), dtype=torch.float32))
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    initialise_weights(model, seed=0)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert experts.std().item() == pytest.approx(model.config.initializer_range, rel=0.1)


@pytest.mark.parametrize("config_class", [ApertusConfig, OpenAIGPTConfig])
def test_parameters_that_only_constructors_set_get_their_value(config_class: type[PretrainedConfig]) -> None:
    """Apertus sets constants in its activation; the first GPT draws its weights in constructors."""
    config = config_class(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config.vocab_size = 64
    model = bind_parameters(build_skeleton(config, dtype=torch.float32))
    resident = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected = {
        name: value.std().item() for name, value in resident.named_parameters() if value.numel() > 999
    }
    constants = {name: value.clone() for name, value in resident.named_parameters() if "alpha" in name}
    for each in (model, resident):
        initialise_weights(each, seed=4)
    assert_same_state(model, resident)
    for name, deviation in expected.items():
        assert model.get_parameter(name).std().item() == pytest.approx(deviation, rel=0.2), name
    assert bool(constants) == (config_class is ApertusConfig)
    for name, value in constants.items():
        assert torch.equal(model.get_parameter(name), value), name


def test_a_parameter_that_nothing_sets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bind_parameters(build_skeleton(FAMILIES["llama"](), dtype=torch.float32))
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda self, module: None)
    monkeypatch.setattr(torch.nn.Embedding, "reset_parameters", lambda self: None)
    with pytest.raises(ModelError, match=r"does not initialise model\.embed_tokens\.weight"):
        initialise_weights(model, seed=0)
