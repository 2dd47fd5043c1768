"""Modules in tiles: losses and gradients of inputs are those of whole rows, gradients of weights nearly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, PreTrainedModel

from megatrain.config.attention import TILED
from megatrain.config.tiles import tile_of
from megatrain.model.blocks import find_blocks
from megatrain.model.documents.begins import set_attention
from megatrain.model.tiles.attention import GroupedAttention
from megatrain.model.tiles.position_wise import parts_in_tiles, tile
from megatrain.model.tiles.tiled import Tiled
from tests.expert_families import APART
from tests.families import FAMILIES
from tests.reference import assert_same_bits, make_model

FAMILY = {**FAMILIES, **APART}


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    return list(dict.fromkeys(block.module for block in find_blocks(model) if block.module is not None))


def names_of(model: PreTrainedModel) -> set[str]:
    """Return the names of the position-wise modules of the first two layers and beside them."""
    found = parts_in_tiles(model, layers_of(model))
    names = {name: module for name, module in model.named_modules() if module in found}
    return {name for name in names if not any(f".{number}." in name for number in range(2, 9))}


def run(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return loss, gradient of the embedded tokens, and gradients of weights."""
    model.zero_grad()
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=ids, use_cache=False).loss
    loss.backward()
    assert embedded.grad is not None
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), embedded.grad, grads


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mixtral", "deepseek_v3", "llama"])
def test_soft_caps_sinks_and_windows_pass_in_tiles_by_attention_of_tiles(
    family: str, dtype: torch.dtype
) -> None:
    """What eager attention has alone otherwise; a window of 9 tokens is shorter than a tile."""
    torch.manual_seed(0)
    config = FAMILY[family]()
    config.sliding_window = 9
    model = make_model(config).to(dtype).train()
    set_attention(model, TILED)
    ids = torch.randint(3, 100, (2, 64))
    loss, of_input, of_weights = run(model, ids)
    undo = tile(model, layers_of(model), 24)
    attention = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    standing = [vars(each)["forward"] for each in attention]
    assert all(isinstance(getattr(each, "together", each), GroupedAttention) for each in standing)
    found = run(model, ids)
    undo()
    assert_same_bits(found[0], loss, "loss")
    assert_same_bits(found[1], of_input, "gradient of the input")
    assert found[2].keys() == of_weights.keys()
    for name, gradient in found[2].items():
        most = 1e-6 if dtype is torch.float32 else 2**-6
        difference = (gradient.float() - of_weights[name].float()).norm()
        assert difference <= most * of_weights[name].float().norm(), name
        if name.endswith("sinks"):
            assert_same_bits(gradient, of_weights[name], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "phi", "olmo2", "granite"]
)
def test_losses_and_gradients_of_inputs_are_those_of_whole_rows(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make_model(FAMILY[family]()).to(dtype).train()
    ids = torch.randint(3, 100, (2, 64))
    loss, of_input, of_weights = run(model, ids)
    for tokens in (32, 24):
        undo = tile(model, layers_of(model), tokens)
        found = run(model, ids)
        undo()
        assert_same_bits(found[0], loss, "loss")
        assert_same_bits(found[1], of_input, "gradient of the input")
        assert found[2].keys() == of_weights.keys()
        for name, gradient in found[2].items():
            most = 1e-6 if dtype is torch.float32 else 2**-6  # each tile's is rounded to bf16
            most *= 4 if ".q_layernorm" in name or ".k_layernorm" in name else 1  # sums that cancel out
            difference = (gradient.float() - of_weights[name].float()).norm()
            assert difference <= most * of_weights[name].float().norm(), name
    again = run(model, ids)
    assert_same_bits(again[1], of_input, "gradient of the input with tiles taken away")


def test_what_is_position_wise_is_found_by_trial() -> None:
    def of(family: str) -> set[str]:
        return {name.removeprefix("model.") for name in names_of(make_model(FAMILY[family]()))}

    norms = {f"layers.{n}.{name}_layernorm" for n in (0, 1) for name in ("input", "post_attention")}
    attention = {"layers.0.self_attn", "layers.1.self_attn"}
    assert of("llama") == {*norms, *attention, "layers.0.mlp", "layers.1.mlp", "norm"}
    assert of("mixtral") == {*norms, *attention, "norm"}, "experts run whole"
    assert of("deepseek_v3") == {*norms, *attention, "layers.0.mlp", "layers.1.mlp.shared_experts", "norm"}
    assert of("phi") == {*attention, "layers.0.mlp", "layers.1.mlp"}, "nn.LayerNorm keeps its input alone"
    assert of("gpt_oss") == {*norms, "norm"}, "eager attention has no log-sum-exp"


def test_a_trial_leaves_the_caller_s_random_state() -> None:
    """It runs in training mode, where dropout draws."""
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = make_model(GPT2Config(**sizes, resid_pdrop=0.1, attn_pdrop=0.1))
    before = torch.get_rng_state()
    parts_in_tiles(model, layers_of(model))
    assert torch.equal(torch.get_rng_state(), before)


def test_modules_that_draw_run_whole() -> None:
    """A tile runs twice, and dropout would draw anew."""
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    assert names_of(make_model(GPT2Config(**sizes, resid_pdrop=0.1))) == set()
    quiet = make_model(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    modules = {f"transformer.h.{n}.{name}" for n in (0, 1) for name in ("attn", "mlp")}
    assert names_of(quiet) == modules
    quiet.transformer.h[0].mlp.dropout.p = 0.1  # a caller's own
    assert names_of(quiet) == modules - {"transformer.h.0.mlp"}


class Wide(nn.Module):
    """Keeps far more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)
        self.rows: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.rows.append(hidden.shape[1])
        return self.down(torch.nn.functional.gelu(self.up(hidden)))


def test_a_recomputation_does_not_run_what_nothing_is_saved_behind() -> None:
    module = Wide()
    module.__dict__["forward"] = Tiled(module, 3, module.forward)
    checkpoint(
        lambda x: x + module(x), torch.randn(1, 7, 4, requires_grad=True), use_reentrant=False
    ).sum().backward()
    assert module.rows == [3, 3, 1] * 2, "the forward and the backward, no tile a third time"


def test_rows_of_a_tile_or_less_run_as_they_are() -> None:
    module = Wide()
    tiled = Tiled(module, 8, module.forward)
    hidden = torch.randn(2, 8, 4, requires_grad=True)
    assert type(tiled(hidden).grad_fn).__name__ == type(module(hidden).grad_fn).__name__
    assert tiled(torch.randn(30, 4)).shape == (30, 4)
    with torch.no_grad():
        module.rows.clear()
        assert torch.allclose(tiled(torch.ones(1, 20, 4)), module(torch.ones(1, 20, 4)))
    assert module.rows == [8, 8, 4, 20]


@pytest.mark.parametrize("frozen", [["up"], ["down"], ["up", "down"]])
def test_frozen_weights_have_no_gradient(frozen: list[str]) -> None:
    module = Wide()
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    hidden = torch.randn(1, 12, 4, requires_grad=True)
    expected = torch.autograd.grad(module(hidden).square().sum(), hidden)[0]
    tiled = Tiled(module, 4, module.forward)
    tiled(hidden).square().sum().backward()
    assert hidden.grad is not None
    assert_same_bits(hidden.grad, expected, "gradient of the input")
    for name, parameter in module.named_parameters():
        assert (parameter.grad is None) is (name.split(".")[0] in frozen), name


def test_a_weight_in_two_places_has_one_gradient() -> None:
    module: Any = Wide().double()
    module.down = nn.Linear(64, 4).double()
    module.down.weight = nn.Parameter(module.up.weight.detach().t().clone())
    module.up.weight = module.down.weight
    module.up.forward = lambda x: torch.nn.functional.linear(x, module.up.weight.t(), module.up.bias)
    hidden = torch.randn(1, 6, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(module(hidden).square().sum(), [module.down.weight])
    Tiled(module, 2, module.forward)(hidden).square().sum().backward()
    assert torch.allclose(module.down.weight.grad, expected, rtol=1e-5)


def test_autocast_is_that_of_the_forward() -> None:
    module = Wide()
    tiled = Tiled(module, 3, module.forward)
    hidden = torch.randn(1, 7, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.autograd.grad(module(hidden).float().sum(), hidden)[0]
        loss = tiled(hidden).float().sum()
    assert_same_bits(torch.autograd.grad(loss, hidden)[0], expected, "gradient of the input")


def test_the_length_of_a_tile_follows_from_that_of_rows_alone() -> None:
    assert [tile_of(n) for n in (1, 32_768, 131_072, 131_073, 1 << 20)] == [0, 0, 0, 4_096, 4_096]
    assert [tile_of(8_192, setting) for setting in (1, 4_096, 8_191, 8_192, 10_000)] == [
        1,
        4_096,
        8_191,
        0,
        0,
    ]
