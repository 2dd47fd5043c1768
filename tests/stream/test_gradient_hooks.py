"""Hooks on gradients of parameters run as torch runs them, on the gradients that the engine gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.errors import ModelError
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_backwards_add_up, assert_same_steps, start

Handles = list[Any]


def bent(grad: Tensor) -> Tensor:
    """Return no linear function of a gradient: the order in which it and sums are taken shows."""
    return grad * grad.abs().sqrt()


def halved(grad: Tensor) -> None:
    grad *= 0.5


def put_hooks(model: PreTrainedModel, seen: list[str]) -> Handles:
    """Hook parameters of every kind of block: in a layer, in none, and one that is tied, twice."""
    embedding = model.get_input_embeddings().weight
    kept = torch.zeros(len(embedding), 1)
    kept[-5:] = 1
    layer = model.model.layers[1]
    hooks: list[tuple[nn.Parameter, Callable[[Tensor], Any]]] = [
        (embedding, lambda grad: grad * kept),
        (layer.mlp.up_proj.weight, bent),
        (layer.mlp.up_proj.weight, halved),
        (layer.self_attn.q_proj.weight, lambda grad: seen.append(str(float(grad.sum())))),
        (model.model.norm.weight, bent),
    ]
    if not model.config.tie_word_embeddings:
        hooks.append((model.get_output_embeddings().weight, bent))
    return [parameter.register_hook(hook) for parameter, hook in hooks]


@pytest.mark.sampled(3)
@every_value(
    family=["llama", "llama_tied"],
    lockstep=[1, 2, 3],
    activations=["recompute", "keep", "offload", "drop_boundary"],
    resident_layers=[0, 2],
    outer_streams=[False, True],
    fragments=[False, True],
)
def test_hooks_run_once_per_micro_batch_on_its_gradient(
    family: str,
    lockstep: int,
    activations: str,
    resident_layers: int,
    outer_streams: bool,
    fragments: bool,
) -> None:
    """In two steps of five micro-batches; before a third one they are removed."""
    model, reference, engine, optimizer = start(
        family,
        num_micro_batches=5,
        lockstep=lockstep,
        activations=activations,
        resident_layers=resident_layers,
        outer_streams=outer_streams and family == "llama",
        fragments=fragments,
    )
    expected: list[str] = []
    found: list[str] = []
    handles = put_hooks(reference.model, expected) + put_hooks(model, found)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=5)
    for handle in handles:
        handle.remove()
    assert_same_steps(engine, optimizer, reference, first=2, steps=1, num_micro_batches=5)
    assert found == expected
    assert len(set(found)) == 10


@pytest.mark.parametrize("outer_streams", [False, True])
def test_hooks_run_once_on_the_gradient_of_a_head_in_chunks(outer_streams: bool) -> None:
    """What they are given is the sum of the chunks."""
    model, _, engine, _ = start(
        "llama", precision="bf16", outer_streams=outer_streams, head_chunk_tokens=8, lockstep=2
    )
    seen: list[Tensor] = []
    model.lm_head.weight.register_hook(lambda grad: seen.append(grad.clone()))
    model.lm_head.weight.register_hook(bent)
    engine.forward_backward(make_batches(2))
    assert [grad.dtype for grad in seen] == [torch.bfloat16] * 2
    expected = (bent(seen[0]).float() + bent(seen[1]).float()).bfloat16().float()
    assert_same_bits(dict(engine.named_gradients())["lm_head.weight"], expected, "lm_head.weight")


def test_hooks_run_in_every_backward_of_the_caller_s() -> None:
    model, reference, engine, optimizer = start("llama_tied")
    expected: list[str] = []
    found: list[str] = []
    put_hooks(reference.model, expected)
    put_hooks(model, found)
    assert_backwards_add_up(engine, optimizer, reference, precision="fp32", reads=False)
    assert found == expected
    assert len(set(found)) == 6


def test_a_hook_s_new_gradient_counts_in_bf16_too() -> None:
    """The hook is given what autograd has made, in the working dtype."""
    model, reference, engine, optimizer = start("llama", precision="bf16", num_micro_batches=2)
    kinds: set[torch.dtype] = set()

    def note(grad: Tensor) -> Tensor:
        kinds.add(grad.dtype)
        return bent(grad)

    for one in (model, reference.model):
        weight = one.model.layers[1].mlp.up_proj.weight
        weight.register_hook(note)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    assert kinds == {torch.bfloat16}


def of_all(parameter: nn.Parameter) -> Any:
    return torch.autograd.graph.register_multi_grad_hook((parameter,), lambda grads: None)


def after(parameter: nn.Parameter) -> Any:
    return parameter.register_post_accumulate_grad_hook(lambda parameter: None)


def returning(value: Callable[[Tensor], Any]) -> Callable[[nn.Parameter], Any]:
    return lambda parameter: parameter.register_hook(value)


def twice(model: PreTrainedModel, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss + model(**batch).loss
    return loss


@pytest.mark.parametrize(
    ("put", "says", "loss", "settings"),
    [
        (after, "named_gradients", None, {}),
        (of_all, "register_multi_grad_hook.*use register_hook", None, {}),
        (returning(bent), "comes in parts", twice, {}),
        (returning(bent), "comes in parts", None, {"micro_batch_size": 1}),
        (returning(lambda grad: grad.double()), r"returned a tensor \(128, 32\) of torch.float64", None, {}),
        (
            returning(lambda grad: grad[:1]),
            r"returned a tensor \(1, 32\).*return one of \(128, 32\)",
            None,
            {},
        ),
        (returning(lambda grad: 1.0), "returned a float", None, {}),
    ],
)
def test_a_hook_that_cannot_be_run_is_refused_by_name_before_anything_changes(
    put: Callable[[nn.Parameter], Any],
    says: str,
    loss: Callable[[PreTrainedModel, Any], Tensor] | None,
    settings: dict[str, Any],
) -> None:
    """The next step, without it, is whole."""
    model = make_model(FAMILIES["llama"]())
    weight = model.lm_head.weight
    engine = attach_plainly(model, device="checked", **settings)
    optimizer = engine.adamw(**HYPER)
    before = {name: master.clone() for name, master in engine.named_masters()}
    handle = put(weight)
    batch = make_batches(1)[0]
    with pytest.raises(
        ModelError, match=f"parameter lm_head.weight.*{says}|hook of parameter lm_head.*{says}"
    ):
        (model(**batch).loss if loss is None else loss(model, batch)).backward()
    engine.zero_grad()
    for name, master in engine.named_masters():
        assert_same_bits(master, before[name], name)
    handle.remove()
    loss_now = model(**batch).loss
    loss_now.backward()
    assert optimizer.step().grad_norm > 0
    assert loss_now.item() > 0
