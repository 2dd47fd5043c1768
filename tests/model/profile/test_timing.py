"""Layers are timed as they are: with real tensors, every kind once, and no trace of it is left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from megatrain.model.profile import timing
from megatrain.model.profile.count import count_anatomy
from megatrain.model.profile.timing import LayerSeconds, time_layers
from megatrain.plan.cost.measured import Measured
from megatrain.plan.cost.rates import Rates
from tests.families import FAMILIES
from tests.plan.anatomies import machine


def test_every_kind_of_layer_is_timed_once() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        mlp_only_layers=[0, 2],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
    )
    timed = time_layers(config, micro_batch_size=2, seq_len=16, precision="fp32")
    assert [kind.numbers for kind in timed] == [(0, 2), (1, 3)]
    assert all(kind.forward_s > 0 and kind.backward_s > 0 for kind in timed)


def test_a_layer_takes_the_time_that_its_forward_and_backward_take(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaMLP.forward
    now_s = [0.0]

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            now_s[0] += 0.02
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            now_s[0] += 0.05
            return grad

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: Slow.apply(forward(self, x)))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(timing, "_BUDGET_S", 0.0)
    (kind,) = time_layers(llama(), micro_batch_size=1, seq_len=8, precision="bf16")
    assert kind.forward_s == pytest.approx(0.02)
    assert kind.backward_s == pytest.approx(0.05)


def llama() -> PretrainedConfig:
    return AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
    )


def test_the_caller_s_random_numbers_go_on_as_before() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    time_layers(llama(), micro_batch_size=1, seq_len=8, precision="fp32")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[pytest.mark.parity] if n % 3 else []) for n, family in enumerate(FAMILIES)],
)
def test_layers_of_every_family_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_BUDGET_S", 0.0)
    config = FAMILIES[family]()
    timed = time_layers(config, micro_batch_size=1, seq_len=12, precision="fp32")
    numbers = sorted(number for kind in timed for number in kind.numbers)
    assert numbers == list(range(config.get_text_config().num_hidden_layers))


def test_rates_are_scaled_to_what_layers_took() -> None:
    anatomy = count_anatomy(llama(), micro_batch_size=1, seq_len=8, precision="bf16", device_type="cpu")
    rates = Rates(machine(flops=1e12), "bf16")
    layer = anatomy.layers[0]
    expected = rates.forward_s(layer.forward) + rates.backward_s(layer.backward)
    timed = [LayerSeconds(expected, 2 * expected, (0, 1, 2))]
    assert Measured.of_layers(rates, anatomy, timed).compute_scale == pytest.approx(3.0)
