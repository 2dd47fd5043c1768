"""`model(**batch)` with a batch that is split into micro-batches: the caller gets what the whole gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.errors import ConfigError, ModelError
from megatrain.stream.engine import Engine
from tests.reference import Batch, Resident, assert_same_bits, make_batches
from tests.stream.forward.test_lockstep import RaiseOnCall, Stop, recorded_visits
from tests.stream.runs import assert_same_gradients, assert_same_masters, family_config, start


def pieces_of(batch: Batch, rows: int) -> list[Batch]:
    """Cut every tensor of a batch by rows."""
    size = len(batch["input_ids"])
    return [{k: v[n : n + rows] for k, v in batch.items()} for n in range(0, size, rows)]


def split_start(
    family: str = "llama", *, rows: int = 2, **settings: Any
) -> tuple[PreTrainedModel, Resident, Engine, Any]:
    return start(family, micro_batch_size=rows, **settings)


def gradients(engine: Engine) -> dict[str, Tensor]:
    found = {name: gradient.clone() for name, gradient in engine.named_gradients()}
    engine.zero_grad()
    return found


def num_rounds(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many micro-batches each round of the lockstep has."""
    sizes: list[int] = []
    run = engine._model_forward.turns.lockstep.run

    def record(calls: Any, **order: Any) -> Any:
        sizes.append(len(calls))
        return run(calls, **order)

    monkeypatch.setattr(engine._model_forward.turns.lockstep, "run", record)
    return sizes


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "size", "padded"), [("llama", 6, False), ("llama", 5, True), ("mixtral", 5, False)]
)
def test_a_split_batch_equals_forward_backward_of_its_pieces(family: str, size: int, padded: bool) -> None:
    """Bit for bit, the short last piece included; and the whole batch's loss to rounding."""
    model, reference, engine, optimizer = split_start(family, lockstep=8)
    for step in range(2):
        batch = make_batches(1, seed=step, rows=size, tokens=20, padded=padded)[0]
        expected = engine.forward_backward(pieces_of(batch, 2))
        wanted = gradients(engine)
        output = model(**batch)
        output.loss.backward()
        assert_same_bits(output.loss.detach(), expected, f"loss of step {step}")
        assert_same_gradients(engine, wanted)
        whole = reference.model(**batch)
        assert output.logits.shape == whole.logits.shape == (size, 20, 128)
        torch.testing.assert_close(output.logits, whole.logits, rtol=1e-5, atol=1e-5)
        if family == "llama":  # the auxiliary loss of a router is not a sum over tokens
            torch.testing.assert_close(output.loss, whole.loss, rtol=1e-5, atol=1e-5)
        stats = optimizer.step()
        reference.forward_backward(pieces_of(batch, 2))
        reference.step(stats.grad_norm, 0.5)


def test_a_split_batch_with_dropout_equals_forward_backward_of_its_pieces() -> None:
    """Every piece draws masks of its own, and the generator goes on as after the same micro-batches."""
    model, _, engine, _ = split_start("gpt2", config=family_config("gpt2", dropout=True), lockstep=8)
    rows = make_batches(1, rows=1)[0]
    batch = {key: value.repeat(4, 1) for key, value in rows.items()}
    torch.manual_seed(3)
    expected = engine.forward_backward(pieces_of(batch, 2))
    state, wanted = torch.get_rng_state(), gradients(engine)
    torch.manual_seed(3)
    output = model(**batch)
    output.loss.backward()
    first, second = output.logits.chunk(2)
    assert not torch.equal(first, second), "two pieces have the same masks"
    assert_same_bits(output.loss.detach(), expected, "loss")
    assert_same_gradients(engine, wanted)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama_tied", {"activations": "recompute", "boundaries": "host"}),
        ("llama", {"activations": "drop_boundary", "outer_streams": True, "updates": "immediate"}),
        ("llama", {"activations": "keep", "precision": "bf16", "gradients": "device"}),
        ("llama", {"activations": "offload", "precision": "bf16", "sums": "host", "outer_streams": True}),
    ],
)
def test_pieces_pass_one_after_the_other_where_gradient_buffers_do_not_suffice(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One buffer, and two fragments of a layer whose gradients would add up together; it is all foreseen."""
    model, reference, engine, optimizer = split_start(family, fragments=True, max_grad_norm=None, **settings)
    visits = recorded_visits(engine, monkeypatch)
    for step in range(2):
        batch = make_batches(1, seed=step, rows=6)[0]
        visits.clear()
        output = model(**batch)
        output.loss.backward()
        assert [number for block, number, _ in visits if block == 0][:3] == [2, 1, 0]
        expected = reference.forward_backward(pieces_of(batch, 2))
        assert_same_bits(output.loss.detach(), expected, f"loss of step {step}")
        if settings.get("updates") != "immediate":
            assert_same_gradients(engine, reference.sums)
        reference.step(optimizer.step().grad_norm, None)
        assert_same_masters(engine, reference)
    assert not engine.executor._surprised


def test_split_batches_add_up_alike_where_layers_stream_and_where_they_are_resident() -> None:
    """In bf16 the first call's gradient is rounded, wherever it is: nobody knows then if others follow."""
    found = []
    for settings in ({}, {"resident_layers": 2}, {"outer_streams": True}):
        model, _, engine, _ = split_start("llama", precision="bf16", head_chunk_tokens=7, **settings)
        for seed in range(2):
            model(**make_batches(1, seed=seed, rows=3)[0]).loss.backward()
        found.append({name: gradient.clone() for name, gradient in engine.named_gradients()})
    for other in found[1:]:
        for name, gradient in other.items():
            assert_same_bits(gradient, found[0][name], name)


def test_a_scaled_loss_scales_every_gradient() -> None:
    """As an outer accumulation does: half the loss, half of each gradient (a power of two is exact)."""
    model, _, engine, _ = split_start()
    batch = make_batches(1, rows=5)[0]
    model(**batch).loss.backward()
    whole = gradients(engine)
    (model(**batch).loss / 2).backward()
    for name, gradient in engine.named_gradients():
        assert_same_bits(gradient, whole[name] / 2, name)


def test_several_split_batches_add_up() -> None:
    """Two calls before the step: two rounds of micro-batches."""
    model, reference, engine, _ = split_start()
    batches = make_batches(2, rows=4)
    sums: dict[str, Tensor] = {}
    for batch in batches:
        model(**batch).loss.backward()
        reference.forward_backward(pieces_of(batch, 2))
        for name, gradient in reference.sums.items():
            sums[name] = sums[name] + gradient if name in sums else gradient.clone()
    for name, gradient in engine.named_gradients():
        torch.testing.assert_close(gradient, sums[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("head_chunk_tokens", [None, 7])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_caller_s_num_items_in_batch_is_respected(
    micro_batch_size: int | None, head_chunk_tokens: int | None
) -> None:
    """Trainers count the tokens of all their micro-batches, and divide every loss by them."""
    model, reference, engine, _ = start(
        "llama", micro_batch_size=micro_batch_size, head_chunk_tokens=head_chunk_tokens
    )
    batch = make_batches(1, rows=4)[0]
    for items in (torch.tensor(240), 240):
        reference.model.zero_grad()
        expected = reference.model(**batch, num_items_in_batch=items).loss
        expected.backward()
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
        assert loss.item() < 0.3 * reference.model(**batch).loss.item()
        for name, gradient in engine.named_gradients():
            torch.testing.assert_close(
                gradient, reference.parameters[name].grad, rtol=1e-4, atol=1e-6, msg=name
            )
        engine.zero_grad()


def test_forward_backward_of_a_larger_batch_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its micro-batches are the caller's."""
    _, reference, engine, _ = split_start(rows=1)
    visits = recorded_visits(engine, monkeypatch)
    expected = reference.forward_backward(make_batches(1, rows=4))
    assert_same_bits(engine.forward_backward(make_batches(1, rows=4)), expected, "loss")
    assert {micro_batch for _, micro_batch, _ in visits} == {0}


# -- arguments -----------------------------------------------------------------------------------------------


def test_what_is_split_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference, engine, _ = split_start()
    sizes = num_rounds(engine, monkeypatch)
    batch = make_batches(1, rows=5)[0]
    model(**batch)
    assert sizes == [3]
    model(**make_batches(1, rows=2)[0])
    assert sizes == [3], "a batch of micro_batch_size rows is one"
    unlabelled = model(input_ids=batch["input_ids"])
    assert sizes == [3], "without labels there is no loss to split"
    assert_same_bits(unlabelled.logits, reference.model(input_ids=batch["input_ids"]).logits, "logits")
    for mode in (torch.no_grad, torch.inference_mode):
        for net in (model, reference.model):
            net.eval()
        with mode():
            expected, found = reference.model(**batch), model(**batch)
            assert_same_bits(found.loss.clone(), expected.loss.clone(), "loss of an evaluation")
            assert_same_bits(found.logits.clone(), expected.logits.clone(), "logits of an evaluation")
        assert sizes == [3], "an evaluation keeps no activations, and is not split"


def test_position_ids_of_one_row_serve_all_rows() -> None:
    model, reference, engine, _ = split_start()
    batch = make_batches(1, rows=4)[0]
    shifted = torch.arange(5, 21)[None]
    one = model(**batch, position_ids=shifted)
    one.loss.backward()
    wanted = gradients(engine)
    for positions in (shifted.expand(4, -1), shifted.repeat(4, 1)):
        output = model(**batch, position_ids=positions)
        output.loss.backward()
        assert_same_bits(output.loss.detach(), one.loss.detach(), "loss")
        assert_same_gradients(engine, wanted)
        engine.zero_grad()
    expected = reference.model(**batch, position_ids=shifted)
    torch.testing.assert_close(one.logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_arguments_by_position_and_embeddings_are_split_too() -> None:
    model, reference, engine, _ = split_start()
    batch = make_batches(1, rows=4)[0]
    expected = model(**batch)
    mask = torch.ones_like(batch["input_ids"])
    by_position = model(batch["input_ids"], mask, labels=batch["labels"])
    torch.testing.assert_close(by_position.loss, expected.loss)
    embeds = reference.model.model.embed_tokens(batch["input_ids"]).detach()
    embedded = model(inputs_embeds=embeds, labels=batch["labels"])
    torch.testing.assert_close(embedded.logits, expected.logits)
    embedded.loss.backward()
    assert "model.layers.0.mlp.up_proj.weight" in dict(engine.named_gradients())


def test_an_unknown_tensor_with_a_row_per_sample_is_refused() -> None:
    model, reference, engine, _ = split_start()
    batch = make_batches(1, rows=4)[0]
    sentence = (
        r"a batch of 4 rows is to be split into micro-batches of 2 \(micro_batch_size\), but it is not known "
        r"how weights is split; pass micro-batches of 2 rows"
    )
    with pytest.raises(ConfigError, match=sentence):
        model(**batch, weights=torch.ones(4))
    expected = reference.forward_backward(pieces_of(batch, 2))
    assert_same_bits(engine.forward_backward(pieces_of(batch, 2)), expected, "loss after the refusal")


# -- outputs -------------------------------------------------------------------------------------------------


def test_tuples_and_indices_give_what_they_give_unsplit() -> None:
    """`out[0]` is the loss, and return_dict=False gives a plain tuple."""
    model, reference, engine, _ = split_start()
    batch = make_batches(1, rows=4)[0]
    output = model(**batch)
    assert_same_bits(output[0].detach(), output.loss.detach(), "first element")
    assert output[1] is output.logits
    assert output["loss"] is output.loss
    output.loss.backward()
    wanted = gradients(engine)
    expected = reference.model(**batch, return_dict=False)
    found = model(**batch, return_dict=False)
    assert type(found) is type(expected) is tuple
    assert_same_bits(found[0].detach(), output.loss.detach(), "loss of a tuple")
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    found[0].backward()
    assert_same_gradients(engine, wanted)


def test_a_split_batch_through_a_chunked_head_has_a_loss_and_no_logits() -> None:
    model, reference, engine, _ = split_start(head_chunk_tokens=7)
    batch = make_batches(1, rows=4)[0]
    output = model(**batch)
    torch.testing.assert_close(output.loss, reference.model(**batch).loss, rtol=1e-5, atol=1e-6)
    assert getattr(output, "logits", None) is None
    output.loss.backward()
    assert len(dict(engine.named_gradients())) == len(reference.parameters)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_second_backward_is_refused_and_harmless(activations: str) -> None:
    model, reference, engine, _ = split_start(activations=activations)
    batch = make_batches(1, rows=4)[0]
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    with pytest.raises(ModelError, match="a second backward through the same forward"):
        loss.backward()
    engine.zero_grad()
    model(**batch).loss.backward()
    reference.forward_backward(pieces_of(batch, 2))
    assert_same_gradients(engine, reference.sums)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_exception_in_one_piece_leaves_the_model_usable(precision: str) -> None:
    model, reference, engine, optimizer = split_start(precision=precision)
    batch = make_batches(1, rows=6)[0]
    handle = model.model.layers[2].mlp.register_forward_pre_hook(RaiseOnCall(2, Stop))
    with pytest.raises(Stop):
        model(**batch)
    handle.remove()
    for step in range(2):
        loss = model(**batch).loss
        loss.backward()
        expected = reference.forward_backward(pieces_of(batch, 2))
        assert_same_bits(loss.detach(), expected, f"loss of step {step}")
        assert_same_gradients(engine, reference.sums)
        stats = optimizer.step()
        reference.step(stats.grad_norm, 0.5)
