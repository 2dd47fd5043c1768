"""What stays of a layer under autocast: kept copies of weights are refused, recomputation is exact."""

from __future__ import annotations

import pytest
import torch

from megatrain.errors import ConfigError
from tests.products import every_value
from tests.reference import assert_same_bits, make_batches
from tests.stream.runs import assert_same_gradients, assert_same_round, start


@pytest.mark.parametrize("fragments", [False, True])
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_keeping_what_autocast_saves_is_refused(activations: str, fragments: bool) -> None:
    model, reference, engine, _ = start("llama", activations=activations, fragments=fragments)
    sentence = (
        rf"activations={activations} under torch.autocast: autograd would keep a cast copy of every weight "
        r"of model.layers.0.*; use activations=recompute, or precision=bf16 in place of autocast"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ConfigError, match=sentence):
            engine.forward_backward(make_batches(1))
        with torch.no_grad():  # an evaluation saves nothing
            expected = reference.model(**make_batches(1)[0]).logits
            assert_same_bits(model(**make_batches(1)[0]).logits, expected, "logits")
    assert_same_round(engine, reference, make_batches(2))


@pytest.mark.sampled(3)
@every_value(
    activations=["recompute", "recompute_cheap", "drop_boundary", ("recompute", "drop_boundary") * 2],
    lockstep=[1, 3],
)
def test_recomputing_under_autocast_is_exact(activations: str, lockstep: int) -> None:
    """The backward runs outside of autocast, and the recomputations in it as the forward ran."""
    model, reference, engine, _ = start("llama_tied", activations=activations, lockstep=lockstep)
    for step in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = reference.forward_backward(make_batches(3, seed=step))
            assert_same_bits(engine.forward_backward(make_batches(3, seed=step)), expected, "loss")
        assert_same_gradients(engine, reference.sums)
        engine.zero_grad()
        batch = make_batches(1, seed=step)[0]
        reference.model.zero_grad()
        for net in (model, reference.model):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(**batch).loss
            loss.backward()
        expected_sums = {name: p.grad for name, p in reference.parameters.items() if p.grad is not None}
        assert_same_gradients(engine, expected_sums)
        engine.zero_grad()
