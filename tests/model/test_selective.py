"""Recomputing what is cheap gives the gradients of keeping everything, bit for bit, in less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedModel

from megatrain.config.policies import KEEP_ATTENTION, RECOMPUTE_CHEAP
from megatrain.errors import ModelError
from megatrain.model.selective import is_kept, keeping
from tests.families import FAMILIES
from tests.reference import assert_same_bits, make_batches, make_model
from tests.stream.execute.test_memory import LiveStorages
from tests.stream.runs import family_config, has_dropout

FEW = ("llama_tied", "gemma2", "mixtral", "gpt2", "deepseek_v3", "gpt_oss", "qwen3_next", "jamba")
CASES = [(family, False) for family in FEW] + [("gpt2", True), ("llama_tied", True)]


@torch.library.custom_op("flash_attn_for_tests::_forward", mutates_args=())
def noisy(x: Tensor, dropout_p: float) -> Tensor:
    """Stand in for attention with dropout in one operation, of which the CPU has none."""
    return x * (torch.rand_like(x) >= dropout_p)


noisy.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0].ne(0), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def moved(family: str, *, dropout: bool = False) -> PreTrainedModel:
    """Make a model none of whose parameters is zero: the biases of gpt_oss's experts begin there."""
    model = make_model(family_config(family, dropout=dropout))
    model.config.use_cache = False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return model


def checkpointed(model: PreTrainedModel, context_fn: Callable[[], Any]) -> None:
    """Run every decoder layer under torch's checkpoint."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = max(lists, key=lambda module: sum(parameter.numel() for parameter in module.parameters()))
    for layer in layers:
        inner = functools.partial(type(layer).forward, layer)
        layer.forward = functools.partial(checkpoint, inner, use_reentrant=False, context_fn=context_fn)


def loss_and_gradients(model: PreTrainedModel, *, tokens: int = 16) -> tuple[dict[str, Tensor], int]:
    """Return the loss and the gradients, and the bytes that the forward leaves for the backward."""
    model.zero_grad()
    torch.manual_seed(5)
    with LiveStorages() as made:
        loss = model(**make_batches(1, tokens=tokens, padded=True)[0]).loss
    live_bytes = sum(nbytes for reference, nbytes in made._live.values() if not reference.expired())
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}, live_bytes


def check_family(family: str, *, dropout: bool) -> None:
    """Check that keeping results changes no gradient, and takes memory in between; attention's takes less."""
    resident, resident_bytes = loss_and_gradients(moved(family, dropout=dropout))
    model = moved(family, dropout=dropout)
    checkpointed(model, noop_context_fn)
    _, recomputed_bytes = loss_and_gradients(model)
    model = moved(family, dropout=dropout)
    checkpointed(model, keeping(RECOMPUTE_CHEAP))
    cheap, cheap_bytes = loss_and_gradients(model)
    model = moved(family, dropout=dropout)
    checkpointed(model, keeping(KEEP_ATTENTION))
    attended, attended_bytes = loss_and_gradients(model)
    assert cheap.keys() == attended.keys() == resident.keys()
    for name, wanted in resident.items():
        assert_same_bits(cheap[name], wanted, name)
        assert_same_bits(attended[name], wanted, name)
    assert recomputed_bytes < cheap_bytes < resident_bytes
    assert recomputed_bytes <= attended_bytes < cheap_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "dropout"), CASES)
def test_gradients_equal_resident_in_less_memory(family: str, dropout: bool) -> None:
    check_family(family, dropout=dropout)


@pytest.mark.parity
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_every_family_equal_resident(family: str, dropout: bool) -> None:
    if dropout and not has_dropout(family):
        pytest.skip(f"{family} knows no dropout")
    check_family(family, dropout=dropout)


def gradients(
    block: Callable[..., Any], context_fn: Callable[[], Any] | None = None, *, after: Any = None
) -> list[Tensor]:
    """Return the gradients of a block of two weights, resident or checkpointed."""
    torch.manual_seed(3)
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    if context_fn is None:
        output = block(*inputs)
    else:
        output = checkpoint(block, *inputs, use_reentrant=False, context_fn=context_fn)
    if after is not None:
        output = after(output)
    return list(torch.autograd.grad(output.square().sum(), inputs))


def assert_same_gradients(block: Callable[..., Any], *, after: Any = None) -> None:
    actual = gradients(block, keeping(RECOMPUTE_CHEAP), after=after)
    for grad, wanted in zip(actual, gradients(block, after=after), strict=True):
        assert_same_bits(grad, wanted)


def torch_s_own(*, allows_mutation: bool = False) -> Callable[[], Any]:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if is_kept(operation, RECOMPUTE_CHEAP)
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return functools.partial(create_selective_checkpoint_contexts, policy, allows_mutation)


def test_matrix_products_do_not_run_again() -> None:
    calls: list[str] = []

    class Recorder(LiveStorages):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func._schema.name)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (x @ first).sin() @ second

    counts = []
    for context_fn in (None, keeping(RECOMPUTE_CHEAP), noop_context_fn):
        calls.clear()
        with Recorder():
            gradients(block, context_fn)
        counts.append((calls.count("aten::mm"), calls.count("aten::sin")))
    assert counts == [(6, 1), (6, 2), (7, 2)], "of a full recomputation torch leaves out the last product"


def test_attention_alone_does_not_run_again() -> None:
    calls: list[str] = []

    class Recorder(LiveStorages):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func._schema.name)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        query, key = (x @ first).sin()[None, None], (x @ second)[None, None]
        return nn.functional.scaled_dot_product_attention(query, key, key)[0, 0] @ second

    counts = []
    for context_fn in (keeping(KEEP_ATTENTION), noop_context_fn):
        calls.clear()
        with Recorder():
            gradients(block, context_fn)
        counts.append(
            (calls.count("aten::_scaled_dot_product_flash_attention_for_cpu"), calls.count("aten::mm"))
        )
    assert counts == [(1, 11), (2, 11)], "the last product of a recomputation is left out in both"
    assert_same_bits(gradients(block, keeping(KEEP_ATTENTION))[0], gradients(block)[0])


def writes_in_place(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    y = x @ first
    y.add_(second)
    y[2:].mul_(second[2:])
    return y.sigmoid() @ second


def test_a_kept_output_that_is_changed_in_place_is_copied_before() -> None:
    """Torch's own contexts refuse it, or change it twice."""
    assert_same_gradients(writes_in_place)
    with pytest.raises(RuntimeError, match="has been mutated"):
        gradients(writes_in_place, torch_s_own())
    wrong = gradients(writes_in_place, torch_s_own(allows_mutation=True))
    assert not torch.equal(wrong[0], gradients(writes_in_place)[0])


def test_a_kept_output_that_is_changed_after_the_block_is_computed_again() -> None:
    def block(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ first
        return y, y.clone().sin() * second

    assert_same_gradients(block, after=lambda output: output[0].mul_(2) + output[1])


def test_attention_with_dropout_runs_again_and_draws_again() -> None:
    """The dropout after it gets the forward's mask. With torch's own contexts it gets another, in silence."""

    def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = noisy(x @ first, 0.5)
        return nn.functional.dropout(y.sin(), 0.5) @ second

    assert is_kept(torch.ops.flash_attn_for_tests._forward.default, RECOMPUTE_CHEAP)
    assert_same_gradients(block)
    assert not torch.equal(gradients(block, torch_s_own())[0], gradients(block)[0])


def test_a_second_backward_of_a_retained_graph_runs_everything() -> None:
    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    output = checkpoint(
        lambda x: (x @ weight).sin() @ weight, x, use_reentrant=False, context_fn=keeping(RECOMPUTE_CHEAP)
    )
    (first,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(output.sum(), x)
    assert_same_bits(first, second)


def test_a_block_that_takes_another_path_is_refused() -> None:
    sizes = iter([8, 8, 4])

    def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        size = next(sizes)
        return (x @ first[:, :size]).sin() @ second[:size]

    gradients(block)
    with pytest.raises(ModelError, match="the block does not do the same twice"):
        gradients(block, keeping(RECOMPUTE_CHEAP))


def test_kept_outputs_go_with_the_graph() -> None:
    """Nothing is held when the backward is over, nor when the graph is dropped without one."""
    weight = torch.randn(64, 64)
    for has_backward in (True, False):
        x = torch.randn(64, 64, requires_grad=True)
        with LiveStorages() as made:
            output = checkpoint(
                lambda x: (x @ weight).sin() @ weight,
                x,
                use_reentrant=False,
                context_fn=keeping(RECOMPUTE_CHEAP),
            )
            if has_backward:
                output.sum().backward()
            x.grad = None
            del output
        assert all(reference.expired() for reference, _ in made._live.values())


@pytest.mark.parametrize(
    ("operation", "wanted"),
    [
        (torch.ops.aten.mm.default, True),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, True),
        (torch.ops.aten._scaled_dot_product_flash_attention_backward.default, False),
        (torch.ops.aten.mm.out, False),
        (torch.ops.aten.native_layer_norm.default, False),
        (torch.ops.aten.addmm_.default, False),
        (torch.ops.higher_order.cond, False),
    ],
)
def test_what_is_kept(operation: Any, wanted: bool) -> None:
    assert is_kept(operation, RECOMPUTE_CHEAP) is wanted
