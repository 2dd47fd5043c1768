"""The loss that routers add counts once in a step, as the mean over its micro-batches, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from tests.families import FAMILIES
from tests.products import every_pair
from tests.reference import make_batches, make_model
from tests.stream.runs import assert_same_round, start

COEFFICIENT = 2.0
"""The balance of the tests' routers is then about a third of the loss."""


def routed(family: str) -> PretrainedConfig:
    config = FAMILIES[family]()
    config.router_aux_loss_coef = COEFFICIENT
    return config


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    found = {name: gradient.clone() for name, gradient in engine.named_gradients()}
    engine.zero_grad()
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{}, {"head_chunk_tokens": 7, "lockstep": 2}])
def test_a_step_of_equal_micro_batches_is_a_step_of_one(settings: dict[str, Any]) -> None:
    """Whatever their number: the loss, and the gradients of routers too."""
    _, reference, engine, _ = start("mixtral", config=routed("mixtral"), **settings)
    batch = make_batches(1)[0]
    output = reference.model(**batch)
    router = COEFFICIENT * output.aux_loss.item()
    assert router > 0.25 * output.loss.item(), "the routers' part would not be seen"
    output.loss.backward()
    expected = {name: parameter.grad for name, parameter in reference.parameters.items()}
    for number in (1, 2, 3):
        loss = engine.forward_backward([batch] * number)
        torch.testing.assert_close(loss, output.loss.detach(), rtol=1e-6, atol=0)
        for name, gradient in gradients(engine).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.sampled(3)
@every_pair(
    family=["mixtral", "qwen3_moe"],
    lockstep=[1, 2],
    activations=["recompute", "keep", "offload"],
)
def test_unequal_micro_batches_train_as_a_plain_loop_does(
    family: str, lockstep: int, activations: str
) -> None:
    """Three of them, one without a label: tokens count by their number, routers by micro-batch."""
    _, reference, engine, _ = start(family, config=routed(family), lockstep=lockstep, activations=activations)
    batches = [*make_batches(2, padded=True), *make_batches(1, seed=5, rows=3, tokens=9)]
    batches[1]["labels"][:] = -100
    assert_same_round(engine, reference, batches)


def test_a_micro_batch_that_asks_for_it_itself_is_averaged_too() -> None:
    """`output_router_logits` among a call's arguments, where the configuration does not say so."""
    config = routed("mixtral")
    config.output_router_logits = False
    _, reference, engine, _ = start("mixtral", config=config)
    batch = make_batches(1)[0]
    asked = {**batch, "output_router_logits": True}
    expected = reference.model(**asked).loss
    assert expected > reference.model(**batch).loss + 0.5
    torch.testing.assert_close(engine.forward_backward([asked] * 2), expected.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("items", [None, 120])
def test_a_batch_that_is_cut_has_the_weight_of_the_whole(items: int | None) -> None:
    """`model(**batch)` in pieces of equal rows returns the whole's loss, whoever counts its tokens."""
    model, reference, _, _ = start("mixtral", config=routed("mixtral"), micro_batch_size=2)
    rows = make_batches(1)[0]
    batch = {key: value.repeat(3, 1) for key, value in rows.items()}
    extra = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    expected, loss = reference.model(**batch, **extra).loss, model(**batch, **extra).loss
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)


def test_a_call_of_its_own_is_as_the_model_makes_it() -> None:
    """Trainers call the model and scale what it returns: to the same bits as without an engine."""
    model, reference, _, _ = start("mixtral", config=routed("mixtral"))
    for batch in make_batches(2):
        extra = {"num_items_in_batch": torch.tensor(60)}
        assert torch.equal(model(**batch, **extra).loss, reference.model(**batch, **extra).loss)
    assert make_model(routed("mixtral")).config.output_router_logits
