"""A linear head in chunks on the device: the bits of a resident model that calls the same function."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.model.shares import count_targets
from megatrain.model.tiles.last_norm import NormOfChunks
from megatrain.stream.engine import Engine
from megatrain.stream.evaluate import row_losses
from tests.chunked import CHUNK, heads_in_chunks
from tests.families import FAMILIES
from tests.host_device.device import TYPE
from tests.host_device.on_device import resident
from tests.host_device.on_device.resident import ResidentOnDevice
from tests.products import every_pair
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_gradients, assert_same_steps


@every_pair(
    family=["llama", "llama_tied", "gemma2", "qwen3", "granite"],
    precision=["bf16", "fp32"],
    num_micro_batches=[1, 3],
    settings=[{}, {"lockstep": 3}, {"outer_streams": True}, {"resident_layers": 3}],
)
def test_its_steps_equal_a_resident_model_s(
    family: str, precision: str, num_micro_batches: int, settings: dict[str, Any]
) -> None:
    config = FAMILIES[family]()
    if config.tie_word_embeddings:
        settings = {name: value for name, value in settings.items() if name != "outer_streams"}
    model = make_model(config)
    reference = ResidentOnDevice(model, precision=precision, **HYPER)
    engine = attach_plainly(
        model,
        device=TYPE,
        precision=precision,
        num_micro_batches=num_micro_batches,
        head_chunk_tokens=CHUNK,
        **settings,
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert engine._model_forward.head.linear is not None
    with heads_in_chunks(reference, reference.there, resident.__name__, is_fused=True):
        assert_same_steps(engine, optimizer, reference, num_micro_batches=num_micro_batches)
    assert engine.counts.chunked_tokens == 2 * num_micro_batches * 32
    assert engine.counts.rerun_tokens == 0
    engine.detach()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_loss_that_somebody_makes_of_it_is_rounded_in_each_micro_batch(family: str) -> None:
    model = make_model(FAMILIES[family]())
    reference = ResidentOnDevice(model, precision="bf16", **HYPER)
    engine = attach_plainly(
        model, device=TYPE, precision="bf16", num_micro_batches=3, lockstep=3, head_chunk_tokens=CHUNK
    )
    batches = make_batches(3)
    total = torch.tensor(sum(count_targets(batch) for batch in batches))
    with heads_in_chunks(reference, reference.there, resident.__name__, is_fused=True, is_plain=False):
        expected = reference.forward_backward(batches)
    given = [{**batch, "num_items_in_batch": total} for batch in batches]

    def loss(batch: Any) -> Tensor:
        value: Tensor = model(**batch).loss
        return value

    found = engine.run_losses([partial(loss, batch) for batch in given], only_loss=True)
    assert_same_bits(torch.stack(found).sum().cpu(), expected, "loss")
    assert_same_gradients(engine, reference.sums)
    assert engine.counts.rerun_tokens == 0
    engine.detach()


@pytest.mark.parametrize("family", ["llama_tied", "gemma2"])
def test_long_rows_pass_the_last_norm_with_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bit is another than where the norm runs by itself, as one that somebody has hooked does."""
    inner, calls = NormOfChunks.go_back, [0]

    def go_back(*args: Any) -> Any:
        calls[0] += 1
        return inner(*args)

    monkeypatch.setattr(NormOfChunks, "go_back", go_back)
    found = []
    for is_watched in (False, True):
        model = make_model(FAMILIES[family]())
        engine = attach_plainly(
            model, device=TYPE, precision="bf16", num_micro_batches=2, head_chunk_tokens=CHUNK, tile_tokens=7
        )
        if is_watched:
            model.model.norm.register_forward_hook(lambda *_: None)
        loss = engine.forward_backward(make_batches(2))
        assert engine._model_forward.head.linear is not None
        found.append((loss, {name: gradient.clone() for name, gradient in engine.named_gradients()}))
        engine.detach()
    assert calls == [2]
    (loss, gradients), (other, expected) = found
    assert_same_bits(loss.cpu(), other.cpu(), "loss")
    for name, gradient in gradients.items():
        assert_same_bits(gradient, expected[name], name)


def test_a_watched_layer_is_called(caplog: pytest.LogCaptureFixture) -> None:
    """Its own code runs, whose loss is the same within rounding; nothing is said."""
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model, device=TYPE, head_chunk_tokens=CHUNK)
    batches = make_batches(1)
    expected = float(engine.forward_backward(batches))
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    assert float(engine.forward_backward(batches)) == pytest.approx(expected, rel=1e-6)
    assert len(seen) == 3
    assert not [record for record in caplog.records if "loss" in record.message]
    engine.detach()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_log_probabilities_of_rows_come_from_it_too(precision: str) -> None:
    """Each row's sum has a factor of its own, so chunks run again in the backward."""
    found = []
    for device, tokens in ((TYPE, CHUNK), ("cpu", 1000)):
        model = make_model(FAMILIES["llama"]())
        engine = attach_plainly(model, device=device, precision=precision, head_chunk_tokens=tokens)
        (batch,) = make_batches(1, rows=3)

        def loss(engine: Engine = engine, batch: Any = batch) -> Tensor:
            rows = row_losses(engine, batch)
            return (
                nn.functional.logsigmoid(rows - 70)
                .mul(torch.tensor([1.0, -2.0, 0.5], device=rows.device))
                .sum()
            )

        (value,) = engine.run_losses([loss], only_loss=True)
        assert engine.counts.rerun_tokens == 3 * 16
        assert (engine._model_forward.head.linear is None) == (device == "cpu")
        found.append({"loss": value.cpu(), **dict(engine.named_gradients())})
        engine.detach()
    close = 1e-4 if precision == "fp32" else 2e-2
    for name, expected in found[1].items():
        torch.testing.assert_close(
            found[0][name], expected, rtol=close, atol=close * float(expected.abs().max()), msg=name
        )
