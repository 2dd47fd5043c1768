"""A call that is recomputed: as torch's checkpoint does it, in few calls, and refused where it cannot be."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatrain.errors import ModelError
from megatrain.stream.activations.recompute import Recomputation
from tests.reference import assert_same_bits

CPU = torch.device("cpu")


def recomputed(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run_first(Recomputation("layers.3", run, CPU), *args, **kwargs)


def run_first(call: Recomputation, *args: Any, **kwargs: Any) -> Any:
    with call.first_run(args, kwargs):
        return call._run(*args, **kwargs)


def layer(hidden: Tensor, *, weight: Tensor, dropout: float = 0.0) -> Tensor:
    """Saves inputs, an output of its own (exp) and a mask."""
    hidden = functional.dropout((hidden @ weight).exp(), dropout)
    return functional.layer_norm(hidden.tanh() @ weight, (8,))


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_and_random_state_are_those_of_torch_s_checkpoint(
    dropout: float, by_name: bool, is_autocast: bool
) -> None:
    """The backward runs outside of autocast, as it mostly does."""

    def train(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(1)
        x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        kwargs = {"weight": weight, "dropout": dropout}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
            hidden = wrap(layer, **kwargs, hidden=x) if by_name else wrap(layer, x, **kwargs)
            hidden = wrap(layer, hidden, **kwargs)
        drawn = torch.rand(3)
        hidden.float().square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [hidden.detach(), x.grad, weight.grad, drawn, torch.rand(3)]

    def checkpointed(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    for found, expected in zip(train(recomputed), train(checkpointed), strict=True):
        assert_same_bits(found, expected)


def test_nothing_is_kept_between_forward_and_backward_and_nothing_after() -> None:
    made: list[weakref.ref[Tensor]] = []

    def run(hidden: Tensor) -> Tensor:
        for _ in range(4):
            hidden = hidden.exp()  # saves its own output
            made.append(weakref.ref(hidden))
        return hidden * 2

    x = torch.randn(3, requires_grad=True)
    result = recomputed(run, x)
    assert [reference() for reference in made] == [None] * 4
    result.sum().backward()
    assert [reference() for reference in made] == [None] * 7  # the second run ends before its last
    assert torch.equal(x.grad, torch.autograd.grad(run(x).sum(), x)[0])  # type: ignore[arg-type]


def test_a_second_run_ends_with_the_last_saved_tensor() -> None:
    ends: list[str] = []

    def run(hidden: Tensor) -> Tensor:
        hidden = hidden.sin()
        try:
            hidden = hidden.exp()
            ends.append("whole")
        except Exception:  # the end is not the model's to catch
            ends.append("caught")
            raise
        return hidden + 1

    recomputed(run, torch.randn(3, requires_grad=True)).sum().backward()
    assert ends == ["whole"]


def test_a_saved_tensor_costs_three_calls() -> None:
    """When it is dropped, when it is made again, and when it is found."""

    def count(num_saved: int) -> int:
        def run(hidden: Tensor) -> Tensor:
            for _ in range(num_saved):
                hidden = hidden.sin()
            return hidden

        calls = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        x = torch.randn(3, requires_grad=True)
        sys.setprofile(note)
        try:
            recomputed(run, x).backward(torch.ones(3))
        finally:
            sys.setprofile(None)
        return calls

    assert count(30) - count(10) == 3 * 20


def test_a_second_backward_is_refused() -> None:
    result = recomputed(lambda hidden: hidden.sin(), torch.randn(3, requires_grad=True))
    result.sum().backward(retain_graph=True)
    with pytest.raises(ModelError, match=r"a second backward .* block layers\.3.*run the forward again"):
        result.sum().backward()


def test_an_input_that_was_changed_is_refused() -> None:
    hidden = torch.randn(3, requires_grad=True) * 1
    result = recomputed(lambda hidden: hidden.sin(), hidden)
    hidden.add_(1)
    with pytest.raises(ModelError, match=r"an input of layers\.3 was changed in place"):
        result.sum().backward()


@pytest.mark.parametrize(
    ("second", "how"),
    [
        (lambda hidden: hidden[:2].sin().sum(), r"it saves \(2,\) of torch.float32 where it saved \(3,\)"),
        (lambda hidden: hidden.double().sin().sum(), "of torch.float64 where it saved .* of torch.float32"),
        (lambda hidden: hidden.sum(), "it saves fewer tensors for the backward"),
    ],
)
def test_a_call_that_does_not_do_the_same_twice_is_refused(
    second: Callable[[Tensor], Tensor], how: str
) -> None:
    runs = iter([lambda hidden: hidden.sin().sum(), second])
    result = recomputed(lambda hidden: next(runs)(hidden), torch.randn(3, requires_grad=True))
    with pytest.raises(ModelError, match=rf"layers\.3 does not compute the same twice.*{how}"):
        result.backward()


def test_a_dropped_tensor_goes_with_the_node_that_saved_it() -> None:
    """Not only with the last of the call: what a backward has used is free while it goes on."""
    alive: list[int] = []

    def run(hidden: Tensor) -> Tensor:
        for _ in range(3):
            hidden = hidden.exp()
            hidden.register_hook(lambda grad: alive.append(sum(dropped_tensors())))
        return hidden

    call = Recomputation("layers.3", run, CPU)

    def dropped_tensors() -> list[bool]:
        found = [reference() for reference, *_ in call._dropped]
        return [dropped is not None and dropped.tensor is not None for dropped in found]

    run_first(call, torch.randn(3, requires_grad=True)).sum().backward()
    assert alive == [0, 2, 1]


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


def _takes_gradients(x: Tensor) -> Tensor:
    own = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(own.tanh().sum(), own)
    return x * grad


def test_gradients_within_a_forward_are_refused() -> None:
    again = Recomputation("block 3", _takes_gradients, torch.device("cpu"))
    with pytest.raises(ModelError, match="block 3 takes gradients within its own forward"):
        run_first(again, torch.ones(4, requires_grad=True))


def test_saved_tensors_read_twice_are_refused() -> None:
    again = Recomputation("block 3", _ReadsTwice.apply, torch.device("cpu"))
    result = run_first(again, torch.ones(4, requires_grad=True))
    with pytest.raises(ModelError, match=r"ctx\.saved_tensors twice in one backward"):
        result.sum().backward()
