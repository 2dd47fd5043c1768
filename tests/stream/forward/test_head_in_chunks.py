"""The head in chunks: which module is the decoder, and what hooks see."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.training.random_search.families import config_of
from tests.families import FAMILIES
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_gradients


def test_a_head_that_is_called_decoder_is_not_taken_for_the_model_s() -> None:
    """Of ModernBERT, `get_decoder` returns the head."""
    model = make_model(config_of("modernbert-decoder"))
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, head_chunk_tokens=8)
    batches = make_batches(2)
    found, expected = engine.forward_backward(batches), reference.forward_backward(batches)
    assert engine.counts.chunked_tokens == sum(batch["labels"].numel() for batch in batches)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for name, gradient in engine.named_gradients():
        torch.testing.assert_close(gradient, reference.sums[name], rtol=1e-4, atol=1e-7)


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
    assert engine.counts.chunked_tokens == 2 * batches[0]["labels"].numel()


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
