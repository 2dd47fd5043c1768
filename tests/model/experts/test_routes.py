"""Routers and what they choose: found in layers with experts, noted once, chosen again by their indices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.experts.routes import Router, Routes, routers_of, watched
from tests.families import FAMILIES
from tests.reference import assert_same_bits, make_model

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]


class Gate(nn.Module):
    """Chooses as it is told."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return self.choose(scores)


def groups_first(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Choose one of two groups by its best two, and two experts in it, as deepseek_v3 does."""
    best = scores.view(-1, 2, 3).topk(2, dim=-1)[0].sum(-1)
    group = torch.topk(best, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best).scatter_(1, group, 1.0).repeat_interleave(3, 1)
    indices = torch.topk(scores.masked_fill(mask == 0, -torch.inf), k=2, dim=-1, sorted=False)[1]
    return scores.gather(1, indices), indices


WAYS: dict[str, Choose] = {
    "topk": lambda scores: torch.topk(scores, 2, dim=-1),
    "least": lambda scores: scores.topk(3, largest=False, sorted=False),
    "along the tokens": lambda scores: torch.topk(scores, k=2, dim=0),
    "max": lambda scores: scores.max(dim=-1),
    "max in place": lambda scores: torch.max(scores, 1, keepdim=True),
    "groups": groups_first,
}


def run(gate: Gate, routes: Routes, scores: Tensor) -> tuple[Tensor, Tensor]:
    with routes.running(), watched([Router("gate", gate)]):
        values, indices = gate(scores)
    return values, indices


@pytest.mark.parametrize("way", WAYS)
def test_a_first_run_is_the_router_s_own_and_a_second_is_the_same_choice(way: str) -> None:
    gate, scores = Gate(WAYS[way]), torch.randn(7, 6, requires_grad=True)
    routes = Routes("layers.0")
    expected = gate(scores)
    (gradient,) = torch.autograd.grad(expected[0].square().sum(), scores)
    for _ in range(3):
        values, indices = run(gate, routes, scores)
        assert_same_bits(values, expected[0])
        assert_same_bits(indices, expected[1])
        assert_same_bits(torch.autograd.grad(values.square().sum(), scores)[0], gradient)
    assert "forward" not in gate.__dict__


@pytest.mark.parametrize("way", WAYS)
def test_other_scores_are_read_at_the_kept_indices_with_their_gradients(way: str) -> None:
    gate, scores = Gate(WAYS[way]), torch.randn(7, 6)
    routes = Routes("layers.0")
    _, indices = run(gate, routes, scores)
    others = (-scores).requires_grad_()
    assert not torch.equal(gate(others)[1], indices)
    values, again = run(gate, routes, others)
    assert_same_bits(again, indices)
    dim = 0 if way == "along the tokens" else 1
    at = indices if indices.ndim == 2 else indices.unsqueeze(1)
    read = others.gather(dim, at)
    assert_same_bits(values, read if indices.ndim == 2 else read.squeeze(1))
    found, expected = (torch.autograd.grad(each.exp().sum(), others)[0] for each in (values, read))
    assert_same_bits(found, expected)


def test_a_choice_is_kept_in_four_bytes() -> None:
    routes = Routes("layers.0")
    run(Gate(WAYS["topk"]), routes, torch.randn(7, 6))
    assert [(kept.dtype, kept.nbytes) for kept in routes.kept] == [(torch.int32, 7 * 2 * 4)]
    of_groups = Routes("layers.0")
    run(Gate(groups_first), of_groups, torch.randn(7, 6))
    assert [kept.nbytes for kept in of_groups.kept] == [7 * 2 * 2 * 4, 7 * 4, 7 * 2 * 4]


def test_nothing_is_kept_where_nothing_runs_again() -> None:
    routes = Routes("layers.0", keeps=False)
    run(Gate(WAYS["topk"]), routes, torch.randn(7, 6))
    assert routes.kept == []


@pytest.mark.parametrize("second", [[8], [7, 7]])
def test_a_router_that_does_something_else_the_second_time_is_an_error(second: list[int]) -> None:
    """It chooses for other tokens, or once more."""
    gate, routes = Gate(WAYS["topk"]), Routes("layers.4.mlp")
    run(gate, routes, torch.randn(7, 6))
    with routes.running(), watched([Router("gate", gate)]):
        for num_tokens in second[1:]:
            gate(torch.randn(num_tokens, 6))
        with pytest.raises(ModelError, match=r"a router of layers\.4\.mlp does not choose for the same"):
            gate(torch.randn(second[0], 6))


def test_visits_that_take_turns_in_a_layer_have_their_own_choices() -> None:
    """As micro-batches do in lockstep, where a layer lets others in before its experts."""
    gate = Gate(WAYS["topk"])
    found: dict[int, tuple[Routes, Tensor]] = {}

    def visit(number: int) -> None:
        scores, routes = torch.randn(7, 6), Routes("layers.0")
        for _ in range(2):
            with routes.running(), watched([Router("gate", gate)]):
                hub.switch()
                _, indices = gate(scores)
                hub.switch()
                scores = -scores
            found.setdefault(number, (routes, indices))
            assert torch.equal(indices, found[number][1])

    hub = getcurrent()
    visits = [greenlet(partial(visit, number)) for number in range(2)]
    while not all(each.dead for each in visits):
        for each in visits:
            each.switch()
    assert [len(routes.kept) for routes, _ in found.values()] == [1, 1]
    assert not torch.equal(found[0][1], found[1][1])
    assert "forward" not in gate.__dict__


def test_a_router_s_own_forward_comes_back_after_a_failure() -> None:
    def fail(scores: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError

    gate = Gate(fail)
    own = gate.forward
    gate.__dict__["forward"] = own
    with pytest.raises(ValueError):  # noqa: PT011
        run(gate, Routes("layers.0"), torch.randn(7, 6))
    assert gate.__dict__["forward"] is own


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", [[], [], [], []]),
        ("mixtral", [["mlp.gate"]] * 4),
        ("deepseek_v3", [[], ["mlp.gate"], ["mlp.gate"], ["mlp.gate"]]),
        ("gpt_oss", [["mlp.router"]] * 4),
        ("jamba", [[], ["feed_forward.router"]] * 2),
    ],
)
def test_routers_are_found_in_layers_with_experts(family: str, names: list[list[str]]) -> None:
    model = make_model(FAMILIES[family]())
    layers = model.get_decoder().layers
    assert [[router.name for router in routers_of(layer)] for layer in layers] == names
