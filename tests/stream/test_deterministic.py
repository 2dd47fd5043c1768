"""`attach(deterministic=True)`: no other bits on a CPU, and one sentence for what has no such form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import ModelError
from tests.families import FAMILIES
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model


@pytest.mark.parametrize("family", ["mixtral", "gpt2"])
def test_a_cpu_gives_the_bits_that_it_gives_without(family: str) -> None:
    model = make_model(FAMILIES[family]())
    reference = Resident(model)
    engine = attach_plainly(model, deterministic=True, num_micro_batches=2)
    assert torch.are_deterministic_algorithms_enabled()
    batches = make_batches(2)
    loss = engine.forward_backward(batches)
    found = {name: value.clone() for name, value in engine.named_gradients()}
    engine.detach()
    assert not torch.are_deterministic_algorithms_enabled()
    assert_same_bits(loss, reference.forward_backward(batches))
    assert found.keys() == reference.sums.keys()
    for name, value in found.items():
        assert_same_bits(value, reference.sums[name], name)


def test_an_operation_without_a_deterministic_form_is_named() -> None:
    model = make_model(FAMILIES["llama"]())
    norm = model.model.layers[1].input_layernorm
    inner = type(norm).forward

    class Putting(type(norm)):  # type: ignore[misc]
        def forward(self, hidden: Tensor) -> Any:
            torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
            return inner(self, hidden)

    norm.__class__ = Putting
    engine = attach_plainly(model, deterministic=True)
    with pytest.raises(ModelError) as caught:
        engine.forward_backward(make_batches(1))
    assert str(caught.value) == (
        "LlamaForCausalLM cannot train with train.deterministic=true: put_ has no form on the cpu device "
        "that gives the same bits in every run; use train.deterministic=false, or another implementation of "
        "it (model.attn_implementation, model.kernels)"
    )
    engine.close()
    assert not torch.are_deterministic_algorithms_enabled()
    plain = attach_plainly(make_model(FAMILIES["llama"]()))
    assert plain.forward_backward(make_batches(1)).isfinite()
    plain.detach()


@pytest.mark.parametrize("first_out", [0, 1])
def test_engines_end_in_any_order(first_out: int) -> None:
    """One that is left keeps its bits, and the last one leaves the process as it was."""
    engines = [attach_plainly(make_model(FAMILIES["llama"]()), deterministic=True) for _ in range(2)]
    engines.pop(first_out).detach()
    assert torch.are_deterministic_algorithms_enabled()
    engines.pop().detach()
    assert not torch.are_deterministic_algorithms_enabled()
