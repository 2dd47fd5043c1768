"""`engine.run_losses`: steps of any loss, normalised as it says, in rounds and in lockstep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.errors import ConfigError
from megatrain.plan.program.step import step_program
from megatrain.stream.steps import PassBefore
from tests.families import FAMILIES
from tests.products import every_pair
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model

Loss = Callable[[PreTrainedModel, Any], Tensor]


def own(model: PreTrainedModel, batch: Any) -> Tensor:
    """Compute a loss from logits, scaled in a way of its own."""
    logits = model(input_ids=batch["input_ids"]).logits
    return logits.logsumexp(-1).square().mean() / 7


def with_references(model: PreTrainedModel, batch: Any) -> Tensor:
    """Compute a loss between two passes without gradients."""
    with torch.no_grad():
        before = model(input_ids=batch["input_ids"].flip(0)).logits
    logits = model(input_ids=batch["input_ids"]).logits
    with torch.no_grad():
        after = model(input_ids=batch["input_ids"].flip(1)).logits
    return (logits - before).square().mean() + (logits * after).mean()


def twice(model: PreTrainedModel, batch: Any) -> Tensor:
    """Compute a loss from two passes with gradients."""
    first = model(input_ids=batch["input_ids"]).logits
    second = model(input_ids=batch["input_ids"].flip(1)).logits
    return (first.softmax(-1) * second).mean()


LOSSES: dict[str, Loss] = {"own": own, "with_references": with_references, "twice": twice}


def resident(
    model: PreTrainedModel, loss: Loss, batches: list[Any]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run plain accumulation."""
    losses = []
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        losses.append(value.detach())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sampled(3)
@every_pair(
    loss=["own", "with_references"],
    lockstep=[1, 2, 3],
    activations=["recompute", "keep", "offload"],
    resident_layers=[0, 2],
    boundaries=["device", "host"],
    outer_streams=[False, True],
)
def test_losses_equal_resident_accumulation(
    loss: str, lockstep: int, activations: str, resident_layers: int, boundaries: str, outer_streams: bool
) -> None:
    """Two steps: what the first has shown of the passes is foreseen in the second."""
    model = make_model(FAMILIES["llama"]())
    plain = copy.deepcopy(model)
    engine = attach_plainly(
        model,
        device="checked",
        lockstep=lockstep,
        num_micro_batches=5,
        activations=activations,
        resident_layers=resident_layers,
        boundaries=boundaries,
        outer_streams=outer_streams,
    )
    engine.arrangement.offloaded._min_bytes = 1
    for step in range(2):
        batches = make_batches(5, seed=step)
        plain.zero_grad()
        expected, gradients = resident(plain, LOSSES[loss], batches)
        found = engine.run_losses([lambda batch=b: LOSSES[loss](model, batch) for b in batches])  # type: ignore[misc]
        for number, (value, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(value, wanted, f"loss {number}")
        own_gradients = dict(engine.named_gradients())
        assert own_gradients.keys() == gradients.keys()
        for name, gradient in own_gradients.items():
            assert_same_bits(gradient, gradients[name], name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lockstep", [1, 2])
def test_two_passes_with_gradients_agree_to_rounding(lockstep: int) -> None:
    """torch adds the parts of one loss before it adds them to the sum of the step, streaming one by one."""
    model = make_model(FAMILIES["llama"]())
    plain = copy.deepcopy(model)
    engine = attach_plainly(model, device="checked", lockstep=lockstep)
    for step in range(2):
        batches = make_batches(4, seed=step)
        plain.zero_grad()
        expected, gradients = resident(plain, twice, batches)
        found = engine.run_losses([lambda batch=b: twice(model, batch) for b in batches])  # type: ignore[misc]
        assert [float(value) for value in found] == [float(value) for value in expected]
        for name, gradient in engine.named_gradients():
            scale = float(gradients[name].abs().max())
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-6 * scale)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lockstep", [1, 2, 4])
def test_passes_before_the_losses_are_the_program_s(lockstep: int) -> None:
    """Two of each micro-batch, in another state of the whole model, are foreseen from the first step on."""
    model = make_model(FAMILIES["llama"]())
    plain = copy.deepcopy(model)
    fields: dict[str, Any] = {"outer_streams": True, "boundaries": "host", "activations": "recompute"}
    engine = attach_plainly(model, device="checked", lockstep=lockstep, num_micro_batches=5, **fields)
    engine.executor._improvise = None  # type: ignore[method-assign,assignment]  # nothing is
    optimizer = engine.adamw(max_grad_norm=None)
    rounds = [min(lockstep, 5 - first) for first in range(0, 5, lockstep)]
    program = step_program(engine.executor.spec, [[1] * count for count in rounds], num_passes_before=2)
    fetched = program.nbytes("fetch") + program.nbytes("load")
    for step in range(2):
        batches = make_batches(5, seed=step)
        found: list[dict[str, Tensor]] = [{} for _ in batches]

        @contextmanager
        def evaluating() -> Iterator[None]:
            model.eval()
            yield
            model.train()

        def passed(number: int, flips: int, batches: Any = batches, found: Any = found) -> None:
            assert model.training is (flips == 1)
            assert not torch.is_grad_enabled()
            found[number][str(flips)] = model(input_ids=batches[number]["input_ids"].flip(flips)).logits

        def loss(number: int, batches: Any = batches, found: Any = found) -> Tensor:
            assert model.training
            logits = model(input_ids=batches[number]["input_ids"]).logits
            return (logits - found[number]["0"]).square().mean() + (logits * found[number]["1"]).mean()

        around: list[Callable[[], AbstractContextManager[object]]] = [evaluating, nullcontext]
        before = [
            PassBefore([partial(passed, number, flips) for number in range(5)], around[flips])
            for flips in range(2)
        ]
        losses = engine.run_losses([partial(loss, number) for number in range(5)], before=before)
        if step == 0:
            expected, gradients = resident(plain, with_references, batches)
            for value, wanted in zip(losses, expected, strict=True):
                assert_same_bits(value, wanted, "loss")
            for name, gradient in engine.named_gradients():
                assert_same_bits(gradient, gradients[name], name)
        optimizer.step()
        assert engine.last_step.fetch_bytes == engine.counts.fetch_bytes / (step + 1) == fetched
        assert engine.last_step.offload_bytes == program.nbytes("offload")


def test_a_reference_pass_is_improvised_once() -> None:
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model, lockstep=2)
    steps: list[int] = []
    improvise = engine.executor._improvise

    def note(*given: Any, **named: Any) -> Any:
        steps.append(step)
        return improvise(*given, **named)

    engine.executor._improvise = note  # type: ignore[method-assign]
    for step in range(3):
        batches = make_batches(4, seed=step)
        engine.run_losses([lambda batch=b: with_references(model, batch) for b in batches])  # type: ignore[misc]
    assert set(steps) == {0}


def test_a_head_runs_in_chunks_only_where_the_model_s_loss_is_all() -> None:
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model)
    engine._model_forward.head.chunk_tokens = 8
    batch = make_batches(1)[0]
    logits: list[bool] = []

    def loss() -> Tensor:
        output = model(**batch)
        logits.append("logits" in output)
        value: Tensor = output.loss
        return value

    whole, chunked = (engine.run_losses([loss], only_loss=only)[0] for only in (False, True))
    assert logits == [True, False]
    assert engine.counts.chunked_tokens == batch["labels"].numel()
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)


def test_an_error_in_a_loss_drops_the_step() -> None:
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model, lockstep=2)
    batches = make_batches(4)
    calls = [lambda batch=b: own(model, batch) for b in batches]
    expected = engine.run_losses(calls)

    def fail() -> Tensor:
        own(model, batches[0])
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        engine.run_losses([calls[0], fail, calls[2]])
    assert not engine.arrangement.gradients.blocks
    assert [float(loss) for loss in engine.run_losses(calls)] == [float(loss) for loss in expected]
    with torch.no_grad():
        own(model, batches[0])  # an evaluation is not taken for a part of a step


def test_a_step_without_losses_is_refused() -> None:
    engine = attach_plainly(make_model(FAMILIES["llama"]()))
    with pytest.raises(ConfigError, match="at least one micro-batch"):
        engine.run_losses([])


def test_what_is_no_loss_is_refused_and_the_next_step_is_whole() -> None:
    model, batches = make_model(FAMILIES["llama"]()), make_batches(2)
    engine = attach_plainly(model)

    def of(batch: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    def inner(batch: Any) -> Tensor:
        return engine.forward_backward([batch])

    refused: list[tuple[Any, str]] = [
        (lambda: of(batches[1]).repeat(2), r"loss 1 of the step returned a tensor \(2,\) of torch.float32"),
        (lambda: of(batches[1]).item(), "loss 1 of the step returned a float"),
        (lambda: of(batches[1]).detach(), "loss 1 of the step has no gradient"),
        (lambda: inner(batches[1]), "has begun another step"),
    ]
    for second, words in refused:
        with pytest.raises(ConfigError, match=words):
            engine.run_losses([lambda: of(batches[0]), second])
    found = engine.run_losses([partial(of, batch) for batch in batches])
    with torch.no_grad():
        assert found == [of(batch) for batch in batches]
