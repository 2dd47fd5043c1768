"""Experts in chunks where little is trained, a call fails, or a caller has put own code beside them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from megatrain.errors import ConfigError, ModelError
from megatrain.layout.blocks import split_part_name
from megatrain.model.small import try_small_model
from megatrain.stream.forward import expert_chunks
from megatrain.train.resume.state import read_state, write_state
from tests.expert_families import APART
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_round, assert_same_steps, start

TRAINED: dict[str, Callable[[str], bool]] = {
    "experts": lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")),
    "routers": lambda name: "gate.weight" in name,
    "the last layer": lambda name: ".layers.2." in name,
    "the last layer's experts": lambda name: ".layers.2." in name and ".experts." in name,
    "the head": lambda name: "lm_head" in name,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lockstep", [2, 1])
@pytest.mark.parametrize("what", TRAINED)
@pytest.mark.parametrize("family", ["deepseek_v3", "flex_olmo", "qwen3_moe"])
def test_what_is_trained_of_a_model_may_be_little(family: str, what: str, lockstep: int) -> None:
    """The order of visits is then another than the foreseen one, and is that of the round before."""

    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(TRAINED[what](name))

    _, reference, engine, optimizer = start(
        config=APART[family](), prepare=freeze, expert_chunks=4, lockstep=lockstep, num_micro_batches=2
    )
    assert_same_steps(engine, optimizer, reference, steps=3, num_micro_batches=2)
    engine.detach()


@pytest.mark.parametrize("settings", [{"num_runs": 2}, {"updates": "immediate", "max_grad_norm": None}])
def test_a_layer_before_the_first_trained_one_is_not_gone_back_through(settings: dict[str, Any]) -> None:
    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".layers.2." in name)

    _, _, engine, optimizer = start(
        config=APART["deepseek_v3"](),
        prepare=freeze,
        expert_chunks=4,
        lockstep=2,
        num_micro_batches=4,
        **settings,
    )
    backward = expert_chunks.ExpertsCall.go_back
    with mock.patch.object(
        expert_chunks.ExpertsCall, "go_back", autospec=True, side_effect=backward
    ) as found:
        for step in range(2):
            engine.forward_backward(make_batches(4, seed=step))
            optimizer.step()
    assert found.call_count == 2 * 4 * 4  # steps, micro-batches and chunks of one layer
    engine.detach()


@pytest.mark.parametrize("family", ["gpt_oss", "flex_olmo"])
@pytest.mark.parametrize("failing", [3, 7])
def test_an_error_among_chunks_comes_out_as_itself_and_the_next_round_is_right(
    family: str, failing: int
) -> None:
    _, reference, engine, optimizer = start(
        config=APART[family](), expert_chunks=4, lockstep=2, num_micro_batches=2
    )
    product, calls = expert_chunks.second_product, 0

    def fail(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise torch.OutOfMemoryError("no room")
        return product(*args)

    with (
        mock.patch.object(expert_chunks, "second_product", fail),
        pytest.raises(torch.OutOfMemoryError, match="no room"),
    ):
        engine.forward_backward(make_batches(2))
    optimizer.zero_grad()
    assert_same_round(engine, reference, make_batches(2))
    engine.detach()


def test_a_second_backward_is_one_sentence() -> None:
    model, _, engine, _ = start(config=APART["qwen3_moe"](), expert_chunks=4)
    loss = model(**make_batches(1)[0]).loss
    loss.backward(retain_graph=True)
    with pytest.raises(ModelError, match="a second backward through the same forward"):
        loss.backward()
    engine.detach()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_hook_on_what_experts_return_may_do_anything(activations: str) -> None:
    """What autograd saves behind them depends on it then, though no class of transformers would."""
    model, reference, engine, _ = start(
        config=APART["deepseek_v3"](), expert_chunks=4, activations=activations, num_micro_batches=2
    )
    for each in (model, reference.model):
        for layer in list(each.model.layers)[1:]:
            layer.mlp.experts.register_forward_hook(lambda module, args, out: torch.tanh(300 * out))
    assert_same_round(engine, reference, make_batches(2))
    engine.detach()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("name", ["inkling_text", "inkling2_text"])
def test_a_weight_that_is_read_behind_the_experts_is_there(name: str, activations: str) -> None:
    """Its module is not called: the one that holds it reads it."""
    config = _small(name)
    _, reference, engine, _ = start(
        config=config, expert_chunks=4, activations=activations, num_micro_batches=2, lockstep=2
    )
    assert any(layer.chunks for layer in engine.arrangement.layers)
    batches = [{**batch, "input_ids": batch["input_ids"] % 40} for batch in make_batches(2)]
    assert_same_round(engine, reference, batches)
    engine.detach()


def _small(name: str) -> PretrainedConfig:
    """Make a small configuration of a type, whose experts are computed in grouped products."""
    configs: list[PretrainedConfig] = []
    try_small_model(CONFIG_MAPPING[name](), lambda model: configs.append(model.config))
    configs[0]._experts_implementation = "grouped_mm"
    return configs[0]


def test_what_is_saved_behind_experts_without_weights_there_keeps_a_layer_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their recomputation would come after the backward that needs it."""

    def gated(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        _, weights, chosen = self.gate(rows)
        return (torch.sigmoid(rows.mean(-1, keepdim=True)) * self.experts(rows, chosen, weights)).view_as(
            hidden
        )

    monkeypatch.setattr(Qwen3MoeSparseMoeBlock, "forward", gated)
    with pytest.raises(
        ConfigError, match="what Qwen3MoeDecoderLayer does beside its experts does not let them come apart"
    ):
        start(config=APART["qwen3_moe"](), expert_chunks=4)


def test_a_matrix_of_experts_that_two_layers_share_keeps_both_whole() -> None:
    def share(model: Any) -> None:
        layers = model.model.layers
        layers[2].mlp.experts.down_proj = layers[0].mlp.experts.down_proj

    _, reference, engine, optimizer = start(config=APART["qwen3_moe"](), prepare=share, expert_chunks=4)
    assert [len(layer.chunks) for layer in engine.arrangement.layers] == [0, 4, 0]
    assert_same_steps(engine, optimizer, reference)
    engine.detach()


@pytest.mark.parametrize("chunks", [(1, 2), (2, 1)])
def test_scales_of_a_chunk_that_ends_within_one_are_read_back(
    tmp_path: Path, chunks: tuple[int, int]
) -> None:
    """65 experts of 64 and 32 elements: the second chunk is one expert, less than what a scale is for."""
    config = APART["qwen3_moe"]()
    config.hidden_size, config.moe_intermediate_size, config.num_experts = 8, 4, 65
    config.head_dim = 2
    found = []
    for number, num_chunks in enumerate(chunks):
        engine = attach_plainly(make_model(config), device="checked", expert_chunks=num_chunks)
        optimizer = engine.adamw(**HYPER, state="int8")
        if number == 0:
            engine.forward_backward(make_batches(1))
            optimizer.step()
            write_state(engine, tmp_path)
        else:
            read_state(engine.host, tmp_path)
        engine.settle()
        found.append(_moments(engine))
        engine.detach()
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def _moments(engine: Any) -> dict[str, torch.Tensor]:
    """Return what is kept of each parameter, the parts of one put together."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for number, layout in enumerate(engine.host.layouts):
        if layout.num_state:
            with engine.host.borrow(number) as block:
                for key, tensor in block.optimizer_tensors().items():
                    name, rows = split_part_name(key)
                    at = 0 if rows is None else rows.start
                    parts.setdefault(name, []).append((at, tensor.clone().flatten()))
    return {
        name: torch.cat([tensor for _, tensor in sorted(of_one, key=lambda each: each[0])])
        for name, of_one in parts.items()
    }


@pytest.mark.parametrize("family", ["qwen3_moe", "flex_olmo"])
def test_a_forward_that_is_dropped_takes_its_tokens_along(family: str) -> None:
    """Nothing waits for a garbage collection, which may not come for long."""
    model, _, engine, _ = start(config=APART[family](), expert_chunks=4)
    model(**make_batches(1)[0]).loss.backward()
    gc.collect()
    gc.disable()
    try:
        before = _floats()
        for _ in range(3):
            model(**make_batches(1)[0])
        assert _floats() - before < 32 * 64  # fewer than a batch has at one width
    finally:
        gc.enable()
    engine.detach()


def _floats() -> int:
    """Count the numbers of the tensors that are alive, of each storage once."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() // 4
        for each in gc.get_objects()
        if type(each) is torch.Tensor and each.is_floating_point()
    }
    return sum(storages.values())
