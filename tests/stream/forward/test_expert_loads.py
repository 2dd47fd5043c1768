"""The tokens of experts, counted by hand: once each in a step, whatever runs again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.stream.engine import Engine
from megatrain.stream.evaluate import losses
from megatrain.stream.forward.compiled import Compiler
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model

CHAIN = ("recompute", "drop_boundary", "drop_boundary", "drop_boundary")
ROUTERS = {
    "mixtral": [f"{number}.mlp.gate" for number in range(4)],
    "qwen3_moe": [f"{number}.mlp.gate" for number in (0, 2, 3)],
    "deepseek_v3": [f"{number}.mlp.gate" for number in (1, 2, 3)],
    "jamba": ["1.feed_forward.router", "3.feed_forward.router"],
}


def attached(family: str, *, is_indifferent: bool = False, **settings: Any) -> Engine:
    """Attach a model, whose routers score all experts alike if they are indifferent."""
    model = make_model(FAMILIES[family]())
    if is_indifferent:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("gate.weight"):
                    parameter.zero_()
    return attach_plainly(model, **{"activations": "recompute", "lockstep": 2, **settings})


def num_tokens(batches: Sequence[Mapping[str, Any]]) -> int:
    return sum(batch["input_ids"].numel() for batch in batches)


@pytest.mark.parametrize("activations", ["recompute", "keep", CHAIN, "keep_attention"], ids=str)
def test_tokens_of_indifferent_routers_go_to_the_first_experts(activations: Any) -> None:
    """Of equal scores `topk` takes the same two for every token."""
    engine, batches = attached("mixtral", is_indifferent=True, activations=activations), make_batches(2)
    loads = engine.count_experts()
    engine.forward_backward(batches)
    counts = {router: count.tolist() for router, count in loads.take().items()}
    (first, second), tokens = torch.topk(torch.zeros(4), 2).indices.tolist(), num_tokens(batches)
    expected = [tokens if expert in (first, second) else 0 for expert in range(4)]
    assert counts == dict.fromkeys(ROUTERS["mixtral"], expected)


@pytest.mark.parametrize("family", ROUTERS)
def test_counts_are_of_what_experts_are_given(family: str) -> None:
    engine, batches = attached(family, activations="keep"), make_batches(2)
    loads = engine.count_experts()
    given: dict[str, Tensor] = {}

    def note(router: str) -> Any:
        def hook(experts: Any, args: tuple[Any, ...]) -> None:
            (indices,) = (value for value in args if isinstance(value, Tensor) and value.dtype == torch.int64)
            found = torch.bincount(indices.flatten(), minlength=experts.num_experts)
            given[router] = given.get(router, 0) + found

        return hook

    for number, layer in enumerate(engine.arrangement.layers):
        for name in layer.router_names:
            experts = layer.module.get_submodule(f"{name.rpartition('.')[0]}.experts")
            experts.register_forward_pre_hook(note(f"{number}.{name}"))
    engine.forward_backward(batches)
    counts = loads.take()
    assert list(counts) == ROUTERS[family]
    per_token = engine.model.config.num_experts_per_tok
    assert {int(count.sum()) for count in counts.values()} == {per_token * num_tokens(batches)}
    for router, count in counts.items():
        assert torch.equal(count, given[router])


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_compiled_layers_count_as_uncompiled_ones(family: str) -> None:
    found = []
    for compiler in (None, Compiler("aot_eager")):
        engine = attached(family)
        loads = engine.count_experts()
        for layer in engine.arrangement.layers:
            if compiler is not None:
                layer.inner = compiler.runner(layer.module, layer.inner)
                layer.leave_routers(layer.module)
        engine.forward_backward(make_batches(2))
        found.append({router: count.tolist() for router, count in loads.take().items()})
        engine.detach()
    assert list(found[0]) == ROUTERS[family]
    assert found[0] == found[1]


def test_counts_begin_anew_when_they_are_read_and_have_no_evaluation() -> None:
    engine, batches = attached("mixtral"), make_batches(2)
    loads = engine.count_experts()
    assert loads.take() == {}
    engine.forward_backward(batches)
    first = loads.take()
    engine.zero_grad()
    for _ in losses(engine, batches):
        pass
    assert {int(count.sum()) for count in loads.take().values()} == {0}
    engine.forward_backward(batches)
    again = loads.take()
    assert all(torch.equal(again[router], count) for router, count in first.items())


def test_a_model_without_experts_counts_nothing() -> None:
    engine = attached("llama")
    loads = engine.count_experts()
    assert not loads.has_routers
    engine.forward_backward(make_batches(2))
    assert loads.take() == {}
