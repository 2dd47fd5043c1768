"""The backward of each micro-batch's head comes before the next one's head, where it can, and in order."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from tests.device_bytes import measure
from tests.families import FAMILIES
from tests.products import every_pair
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import assert_same_round, start
from tests.stream.test_router_losses import routed

TOKENS, HIDDEN = 128, 16
WIDE = LlamaConfig(  # logits weigh more than all layers keep
    vocab_size=4096,
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
LOGITS = 4 * TOKENS * 4096
BOUNDARY = 4 * TOKENS * HIDDEN


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [{}, {"outer_streams": True}, {"head_chunk_tokens": 32}])
def test_a_round_takes_the_memory_of_one_head(settings: dict[str, Any]) -> None:
    """Each further micro-batch brings what it keeps of the layers, and less than a tenth of its logits."""
    peaks = [
        measure(
            WIDE,
            precision="fp32",
            micro_batch_size=1,
            seq_len=TOKENS,
            num_micro_batches=number,
            lockstep=number,
            activations="recompute",
            num_gradient_buffers=1,
            **settings,
        ).dynamic_bytes
        for number in (2, 6)
    ]
    each = (peaks[1] - peaks[0]) / 4
    assert 2 * BOUNDARY <= each <= 6 * BOUNDARY < LOGITS / 10


# -- losses that reach the layers by another way ----------------------------------------------------------


def of_hidden_states(model: PreTrainedModel, batch: Any) -> Tensor:
    """Compute a loss from what the model returns beside logits."""
    output = model(**batch, output_hidden_states=True)
    return output.loss + sum(hidden.square().mean() for hidden in output.hidden_states[:-1]) / 7


def of_some(model: PreTrainedModel, batch: Any) -> Tensor:
    """Compute a loss that reaches the layers by another way for some micro-batches alone."""
    of = of_hidden_states if int(batch["input_ids"][0, 0]) % 2 else plain
    return of(model, batch)


def plain(model: PreTrainedModel, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@pytest.mark.sampled(4)
@every_pair(
    loss=[plain, of_hidden_states, of_some],
    family=["llama", "llama_tied", "gpt2"],
    lockstep=[1, 2, 4],
    activations=["recompute", "keep", "drop_boundary"],
    outer_streams=[False, True],
    fragments=[False, True],
)
def test_any_loss_equals_resident_accumulation(
    loss: Any, family: str, lockstep: int, activations: str, outer_streams: bool, fragments: bool
) -> None:
    """Two steps, of which the second is foreseen as the first has gone."""
    model = make_model(FAMILIES[family]())
    plain_model = copy.deepcopy(model)
    engine = attach_plainly(
        model,
        device="checked",
        lockstep=lockstep,
        num_micro_batches=4,
        activations=activations,
        outer_streams=outer_streams and family == "llama",
        fragments=fragments,
    )
    for step in range(2):
        batches = make_batches(4, seed=step)
        plain_model.zero_grad()
        expected = []
        for batch in batches:
            expected.append(loss(plain_model, batch))
            expected[-1].backward()
        found = engine.run_losses([partial(loss, model, batch) for batch in batches])
        for number, (value, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(value, wanted.detach(), f"loss {number}")
        gradients = dict(engine.named_gradients())
        for name, parameter in plain_model.named_parameters():
            assert parameter.grad is not None
            assert_same_bits(gradients[name], parameter.grad, name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{"outer_streams": True}, {"activations": "keep"}])
def test_routers_losses_in_lockstep_equal_a_plain_loop(settings: dict[str, Any]) -> None:
    """They reach every layer, so all heads pass before the backward, which comes to them in order."""
    _, reference, engine, _ = start("mixtral", config=routed("mixtral"), lockstep=3, **settings)
    for step in range(2):
        assert_same_round(engine, reference, make_batches(3, seed=step))
        engine.zero_grad()


def test_a_model_may_change_the_last_layer_s_output_in_place() -> None:
    """And have hooks on it, which are called once."""
    _, reference, engine, _ = start("llama", lockstep=2)
    calls: list[int] = []

    def scale(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].mul_(3.0)

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: calls.append(grad.shape[1]))

    for net in (engine.model, reference.model):
        net.model.norm.register_forward_pre_hook(scale)
        net.model.layers[-1].register_forward_hook(watch)
    assert_same_round(engine, reference, make_batches(2))
    assert len(calls) == 4


def test_a_head_that_alone_is_trained_equals_resident() -> None:
    """No gradient goes back to the layers."""
    model = make_model(FAMILIES["llama"]())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    plain_model = copy.deepcopy(model)
    engine = attach_plainly(model, device="checked", lockstep=3, head_chunk_tokens=7)
    batches = make_batches(3)
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    engine.forward_backward(batches)
    for batch in batches:
        plain_model(**batch, num_items_in_batch=total).loss.backward()
    found = dict(engine.named_gradients())
    torch.testing.assert_close(found["lm_head.weight"], plain_model.lm_head.weight.grad, rtol=1e-5, atol=1e-7)
