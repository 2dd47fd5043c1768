"""The head in chunks: a resident model's bits, which module is the decoder, and what hooks see."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from benchmarks.training.random_search.families import config_of
from tests.chunked import CHUNK, heads_in_chunks
from tests.families import FAMILIES
from tests.kinds import tiny_config
from tests.products import every_pair
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_gradients, assert_same_steps, start


@pytest.mark.sampled(3)
@every_pair(
    family=["llama", "llama_tied", "gemma2", "phi", "granite"],
    precision=["bf16", "fp32"],
    num_micro_batches=[1, 3],
    lockstep=[1, 3],
    outer_streams=[False, True],
    activations=["keep", "recompute"],
)
def test_the_bits_of_a_resident_model_that_runs_in_chunks(
    family: str,
    precision: str,
    num_micro_batches: int,
    lockstep: int,
    outer_streams: bool,
    activations: str,
) -> None:
    """Soft caps, scales, biases and tied weights are the model's own; nothing runs a second time."""
    is_tied = FAMILIES[family]().tie_word_embeddings
    _, reference, engine, optimizer = start(
        family,
        precision=precision,
        num_micro_batches=num_micro_batches,
        lockstep=lockstep,
        outer_streams=outer_streams and not is_tied,
        activations=activations,
        head_chunk_tokens=CHUNK,
    )
    with heads_in_chunks(reference, reference.model):
        assert_same_steps(engine, optimizer, reference, num_micro_batches=num_micro_batches)
    assert engine.counts.chunked_tokens == 2 * num_micro_batches * 32
    assert engine.counts.rerun_tokens == 0
    assert not engine.executor._surprised


def test_a_sum_of_the_head_in_bf16_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of the test above adds chunks up in fp32."""

    def added(held: Tensor | None, grad: Tensor | None) -> Tensor | None:
        return grad if held is None or grad is None else (held + grad)

    monkeypatch.setattr("megatrain.model.head.chunks._added", added)
    _, reference, engine, optimizer = start("llama_tied", precision="bf16", head_chunk_tokens=CHUNK)
    with (
        heads_in_chunks(reference, reference.model),
        pytest.raises(AssertionError, match="embed_tokens"),
    ):
        assert_same_steps(engine, optimizer, reference, num_micro_batches=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_where_gradients_are_made_changes_no_bit(precision: str, factor: float) -> None:
    """With the loss in a call of a step, and after it where somebody else runs the backward."""
    batch = make_batches(1)[0]
    found = []
    for is_step in (True, False):
        model = make_model(FAMILIES["gemma2"]())
        engine = attach_plainly(model, precision=precision, head_chunk_tokens=CHUNK)

        def loss(model: PreTrainedModel = model) -> Tensor:
            value: Tensor = model(**batch).loss * factor
            return value

        with FlopCounterMode(display=False) as counter:
            if is_step:
                engine.run_losses([loss], only_loss=True)
            else:
                loss().backward()
        assert engine.counts.rerun_tokens == (0 if is_step else 32)
        found.append((counter.get_total_flops(), dict(engine.named_gradients())))
    (eager, one), (late, other) = found
    assert late - eager == 2 * 32 * model.lm_head.weight.numel()
    for name, gradient in one.items():
        assert_same_bits(gradient, other[name], name)


def test_a_loss_of_more_than_the_last_hidden_states_is_computed_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of a model that adds to its loss what its decoder returns beside them."""
    model = make_model(FAMILIES["llama"]())
    with_others(model)
    reference = Resident(model, **HYPER)
    with_others(reference.model)
    engine = attach_plainly(model, head_chunk_tokens=8)
    batches = make_batches(1)
    expected = reference.forward_backward(batches)
    assert_same_bits(engine.forward_backward(batches), expected, "loss")
    assert_same_gradients(engine, reference.sums)
    (said,) = [record.message for record in caplog.records if "whole" in record.message]
    assert (
        said
        == "OfMore computes its loss whole: it depends on more than the last hidden states of its decoder"
    )


def with_others(model: PreTrainedModel) -> None:
    """Let a model add to its loss the mean of the layers' results, which its decoder returns too."""
    own = type(model)

    class OfMore(own):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **named: Any) -> Any:
            decoded = self.model(input_ids, output_hidden_states=True)
            logits = self.lm_head(decoded.last_hidden_state)
            loss = self.loss_function(logits, labels, logits.shape[-1], **named)
            added = decoded.hidden_states[1].float().mean() * 0.0 + decoded.hidden_states[1].float().mean()
            return type("Output", (dict,), {"loss": loss + (added - added.detach())})(loss=loss)

    model.__class__ = OfMore


def assert_comes_in_chunks(model: PreTrainedModel) -> None:
    """Assert that all tokens pass the head in chunks, with the loss and gradients of a resident model."""
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, head_chunk_tokens=8)
    batches = make_batches(2)
    found, expected = engine.forward_backward(batches), reference.forward_backward(batches)
    assert engine.counts.chunked_tokens == sum(batch["labels"].numel() for batch in batches)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for name, gradient in engine.named_gradients():
        torch.testing.assert_close(gradient, reference.sums[name], rtol=1e-4, atol=1e-7)


def test_a_head_that_is_called_decoder_is_not_taken_for_the_model_s() -> None:
    """Of ModernBERT, `get_decoder` returns the head."""
    assert_comes_in_chunks(make_model(config_of("modernbert-decoder")))


def test_a_decoder_that_goes_by_another_name_is_found() -> None:
    """Of Llama 4, `get_decoder` returns the whole model."""
    assert_comes_in_chunks(make_model(tiny_config("llama4_text")))


def test_a_model_whose_decoder_makes_the_loss_computes_it_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Kosmos-2.5 gives the labels to a causal language model inside."""
    model = make_model(tiny_config("kosmos-2.5"))
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, head_chunk_tokens=8)
    for _ in range(2):
        batches = make_batches(2)
        expected = reference.forward_backward(batches)
        assert_same_bits(engine.forward_backward(batches), expected, "loss")
        engine.zero_grad()
    said = [record.message for record in caplog.records if "whole" in record.message]
    name = "Kosmos2_5ForConditionalGeneration"
    assert said == [f"{name} computes its loss whole: it has no decoder that leaves it the loss"]


def test_a_model_that_does_not_call_its_decoder_computes_its_loss_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model(FAMILIES["llama"]())
    reference = Resident(model, **HYPER)
    other = torch.nn.Linear(1, 1)
    model.get_decoder = lambda: other
    engine = attach_plainly(model, head_chunk_tokens=8)
    for _ in range(2):
        batches = make_batches(2)
        expected = reference.forward_backward(batches)
        assert_same_bits(engine.forward_backward(batches), expected, "loss")
        assert_same_gradients(engine, reference.sums)
        engine.zero_grad()
    said = [record.message for record in caplog.records if "whole" in record.message]
    assert said == ["LlamaForCausalLM computes its loss whole: it does not call its decoder"]


def test_an_exception_in_a_hook_of_the_head_comes_out_and_the_head_stays_in_chunks() -> None:
    """Whether chunks add up is tried first: hooks do not see that."""
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model, head_chunk_tokens=8)
    batches, rows = make_batches(1), []

    def fail(_: Any, __: Any, output: Tensor) -> None:
        rows.append(output.shape[1])
        if len(rows) == 2:
            raise ValueError("not today")

    handle = model.lm_head.register_forward_hook(fail)
    with pytest.raises(ValueError, match="not today"):
        engine.forward_backward(batches)
    handle.remove()
    assert rows == [8, 8]
    engine.forward_backward(batches)
    assert engine.counts.chunked_tokens == batches[0]["labels"].numel()


def test_a_head_in_chunks_whose_weight_is_read_streams_too() -> None:
    """Mamba casts to the dtype of `lm_head.weight`: that is no other use of the weight."""
    found = []
    for streams in (False, True):
        model = make_model(config_of("mamba2"))
        engine = attach_plainly(model, head_chunk_tokens=16, outer_streams=streams)
        for batch in make_batches(2, rows=3):
            model(**batch).loss.backward()
        assert engine.counts.chunked_tokens == 2 * 3 * 16
        found.append(dict(engine.named_gradients()))
    for name, gradient in found[1].items():
        assert_same_bits(gradient, found[0][name], name)


@pytest.mark.parametrize("how", ["by hand", "losses"])
def test_parts_of_a_head_add_up_alike_where_passes_are_not_foreseen(how: str) -> None:
    """In bf16, of calls with two passes each: a head that streams rounds no sum that others add to."""
    found = []
    batches = make_batches(4, rows=2)
    for settings in ({}, {"outer_streams": True, "gradients": "device"}):
        model = make_model(FAMILIES["llama"]())
        engine = attach_plainly(
            model, head_chunk_tokens=8, precision="bf16", num_micro_batches=2, lockstep=2, **settings
        )

        def loss(one: Any, other: Any, model: Any = model) -> Tensor:
            value: Tensor = model(**one).loss / 2 + model(**other).loss / 3
            return value

        for _ in range(2):
            if how == "losses":
                pairs = batches[:2], batches[2:]
                engine.run_losses([partial(loss, *pair) for pair in pairs], only_loss=True)
            else:
                loss(*batches[:2]).backward()
                model(**batches[2]).loss.backward()
            found.append({name: gradient.clone() for name, gradient in engine.named_gradients()})
            engine.zero_grad()
    for other in found[1:]:
        for name, gradient in other.items():
            assert_same_bits(gradient, found[0][name], name)
