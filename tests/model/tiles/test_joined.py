"""Hooks see and change in tiles what they see and change in whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.model.tiles import attention
from megatrain.model.tiles.position_wise import tile
from tests.families import FAMILIES
from tests.model.tiles.test_tiled import layers_of
from tests.reference import assert_same_bits, make_model
from tests.stream.forward.test_tiles import TILE
from tests.stream.runs import assert_same_gradients, start


@pytest.fixture(autouse=True)
def _in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_IN_GROUPS", 0)


def ids(tokens: int = 16) -> Tensor:
    return torch.randint(3, 90, (2, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("is_before", [False, True], ids=["output", "input"])
@pytest.mark.parametrize("name", ["input_layernorm", "self_attn", "self_attn.v_proj", "mlp", "mlp.down_proj"])
def test_what_a_hook_changes_is_what_it_changes_in_whole_rows(name: str, is_before: bool) -> None:
    """A norm that passes inside of the module behind it would undo what its hook does."""
    found = []

    def half(first: Any) -> Any:
        return (first[0] * 0.5, *first[1:]) if isinstance(first, tuple) else first * 0.5

    for is_tiled in (False, True):
        model = make_model(FAMILIES["llama"]()).train()
        for layer in model.model.layers:
            module = layer.get_submodule(name)
            if not is_before:
                module.register_forward_hook(lambda _, __, output: half(output))
            elif name == "self_attn":
                module.register_forward_pre_hook(
                    lambda _, args, kwargs: (args, {**kwargs, "hidden_states": kwargs["hidden_states"] + 1}),
                    with_kwargs=True,
                )
            else:
                module.register_forward_pre_hook(lambda _, args: (args[0] + 1, *args[1:]))
        undo = tile(model, layers_of(model), TILE) if is_tiled else lambda: None
        embedded = model.get_input_embeddings()(ids()).detach().requires_grad_()
        loss = model(inputs_embeds=embedded, labels=ids(), use_cache=False).loss
        loss.backward()
        undo()
        assert embedded.grad is not None
        found.append((loss.detach(), embedded.grad))
    assert_same_bits(found[1][0], found[0][0], "loss")
    assert_same_bits(found[1][1], found[0][1], "gradient of the input")


@pytest.mark.parametrize("activations", ["recompute", "keep_attention"])
def test_a_hook_sees_what_is_computed_and_may_go_before_the_backward(activations: str) -> None:
    """Nothing that a hook sees is left out, in any run; and a second run goes the way of the first."""
    model, reference, engine, _ = start(
        config=FAMILIES["llama"](), tile_tokens=TILE, activations=activations, boundaries="host"
    )
    engine.arrangement.offloaded._min_bytes = 1
    tile(reference.model, layers_of(reference.model), TILE)
    seen: list[tuple[str, Tensor]] = []
    layer = model.model.layers[1]
    hooks = []
    for name in ("input_layernorm", "self_attn.q_proj"):

        def note(_: Any, __: Any, output: Tensor, name: str = name) -> None:
            seen.append((name, output.detach().clone()))

        hooks.append(layer.get_submodule(name).register_forward_hook(note))
    batch = {"input_ids": ids(), "labels": ids()}
    expected: list[Tensor] = []
    hidden = reference.model(**batch, output_hidden_states=True).hidden_states[1].detach()
    whole = reference.model.model.layers[1]
    normed = type(whole.input_layernorm).forward(whole.input_layernorm, hidden)
    expected = list(whole.self_attn.q_proj(normed).split(TILE, dim=1))
    reference.model.zero_grad()

    loss = model(**batch).loss
    assert_same_bits(seen[0][1], normed, "output of the norm")
    for hook in hooks[:1]:
        hook.remove()
    loss.backward()
    of_tiles = [tensor for name, tensor in seen if name == "self_attn.q_proj"]
    assert len(of_tiles) >= 4 * len(expected)
    for number, tensor in enumerate(of_tiles):
        torch.testing.assert_close(tensor, expected[number % len(expected)], rtol=1e-5, atol=1e-6)
    hooks[1].remove()
    reference.forward_backward([batch])
    assert_same_gradients(engine, reference.sums)
    engine.detach()


def test_attentions_that_were_once_asked_for_change_nothing() -> None:
    """The hooks of transformers, which stay for good, read outputs alone."""
    model = make_model(FAMILIES["llama"]()).train()
    tile(model, layers_of(model), TILE)
    model(ids(), output_hidden_states=True, output_attentions=True, use_cache=False)
    attends = model.model.layers[0].self_attn
    assert attends._forward_hooks
    assert not vars(attends)["forward"].joined.are_apart
    attends.register_forward_hook(lambda *_: None)
    assert vars(attends)["forward"].joined.are_apart
