"""Routers in compiled layers: recomputation finds the choices of the forward there too."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatrain.model.experts.routes import Routes
from megatrain.stream.forward.compiled import Compiler
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model

CHAIN = ("recompute", "drop_boundary", "drop_boundary", "drop_boundary")


@pytest.mark.parametrize("activations", ["recompute", CHAIN], ids=["recompute", "chain"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_compiled_layer_finds_the_choices_of_its_forward(family: str, activations: Any) -> None:
    """One graph serves all layers; what was tried out before is no choice of a visit."""
    config = FAMILIES[family]()
    engine = attach_plainly(make_model(config), activations=activations, lockstep=2)
    compiler = Compiler("aot_eager")
    for layer in engine.arrangement.layers:
        layer.inner = compiler.runner(layer.module, layer.inner)
        layer.leave_routers(layer.module)
    made: list[Tensor] = []
    again: list[Tensor] = []
    inner = Routes.choose

    def choose(routes: Routes, scores: Tensor, dim: int, make: Any) -> Any:
        is_again = routes._has_run
        values, indices = inner(routes, -scores if is_again else scores, dim, make)
        (again if is_again else made).append(indices.clone())
        return values, indices

    with mock.patch.object(Routes, "choose", choose):
        engine.forward_backward(make_batches(2))
    assert {structure.fault for structure in compiler.structures} == {None}
    num_choices = {"mixtral": 4, "deepseek_v3": 3 * 3}[family]
    assert len(made) == num_choices * 2
    assert len(again) >= len(made)
    assert all(any(torch.equal(indices, first) for first in made) for indices in again)


def test_a_compiled_choice_has_the_gradient_of_topk() -> None:
    scores = torch.randn(5, 6, requires_grad=True)
    values, indices = torch.ops.megatrain.choose(scores, 2, -1, True, True, True)
    expected = torch.topk(scores, 2)
    assert torch.equal(indices, expected.indices)
    grads = [torch.autograd.grad(each.exp().sum(), scores)[0] for each in (values, expected.values)]
    assert torch.equal(*grads)
