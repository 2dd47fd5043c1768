"""torch's variable-length attention on the test device, whose kernel reads there where documents begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config.attention import VARLEN
from megatrain.model.documents import begins, varlen
from megatrain.model.documents.able import has_varlen
from megatrain.model.documents.begins import Packed, documents, set_attention, told_of
from megatrain.train.loop import train
from tests.host_device.device import TYPE, register
from tests.model.documents.test_varlen import batch_of, cut
from tests.reference import assert_same_bits
from tests.stream.runs import start
from tests.train.project import WORDS, make_config, write_model_config

host = register()


@pytest.mark.parametrize("window", [None, 4, 100])
def test_the_kernel_computes_what_one_document_at_a_time_does(window: int | None) -> None:
    lengths, generator = [7, 1, 24, 0, 0], torch.Generator().manual_seed(1)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    host.native.take_counts()
    query = torch.randn(32, 4, 8, generator=generator).bfloat16()
    key, value = (torch.randn(32, 2, 8, generator=generator).bfloat16() for _ in range(2))
    grad = torch.randn(32, 4, 8, generator=generator).bfloat16()
    wide = [each.float().requires_grad_() for each in (query, key, value)]
    outputs = []
    for part in zip(*(each.split(lengths) for each in wide), strict=True):
        q, k, v = (each.transpose(0, 1)[None] for each in part)
        if len(part[0]):
            attend = torch.nn.functional.scaled_dot_product_attention
            mask = torch.ones(len(part[0]), len(part[0]), dtype=torch.bool).tril().triu(1 - (window or 99))
            outputs.append(attend(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    expected = torch.cat(outputs)
    expected.backward(grad.float())
    ours = [each.to(TYPE).requires_grad_() for each in (query, key, value)]
    output = varlen._varlen(ours[0], ours[1], ours[2], starts.to(TYPE), 512, None, window)
    output.backward(grad.to(TYPE))
    torch.testing.assert_close(output.detach().cpu().float(), expected.detach(), rtol=1e-2, atol=1e-2)
    for mine, other in zip(ours, wide, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu().float(), other.grad, rtol=2e-2, atol=2e-2)
    counts = host.native.take_counts()
    assert (counts["varlen attention"], counts["varlen attention backward"]) == (1, 1)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_packed_rows_stream_to_the_bits_of_a_resident_model(activations: str) -> None:
    assert has_varlen(torch.device(TYPE))
    batch = batch_of(cut(3, 9))
    model, reference, engine, optimizer = start(
        family="llama",
        prepare=lambda model: set_attention(model, VARLEN),
        device=TYPE,
        precision="bf16",
        activations=activations,
        max_grad_norm=None,
    )
    told = {**batch, **told_of(batch["position_ids"]), "use_cache": False}
    with documents(Packed(is_packed=True)):
        expected = reference.forward_backward([told])
    host.native.take_counts()
    host.native.delay(6, 0.1, 3e-4, 1e-4)
    loss = engine.forward_backward([batch])
    assert_same_bits(loss.cpu(), expected.cpu())
    norm = float(optimizer.step().grad_norm)
    assert norm == pytest.approx(reference.norm(), rel=1e-6)
    counts = host.native.take_counts()
    layers = model.config.num_hidden_layers
    assert counts["varlen attention"] == (2 * layers if activations == "recompute" else layers)
    assert counts["varlen attention backward"] == layers
    reference.step(norm, None)
    for name, master in engine.named_masters():
        assert_same_bits(master, reference.master(name), name)
    engine.detach()


def shift_a_document(patch: pytest.MonkeyPatch) -> None:
    """The second document is said to begin one token late."""
    tell = begins._told

    def wrong(*arguments: Any, **settings: Any) -> dict[str, Any]:
        told = tell(*arguments, **settings)
        starts = told["cu_seq_lens_q"].clone()
        starts[1] += 1
        return {**told, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}

    patch.setattr(begins, "_told", wrong)


def make_a_mask(patch: pytest.MonkeyPatch) -> None:
    """The maker of masks does not hear that rows are packed."""
    patch.setattr(varlen, "packed_now", lambda: None)


@pytest.mark.parametrize(
    ("fault", "shows"), [(shift_a_document, "loss"), (make_a_mask, "counts"), (lambda patch: None, "nowhere")]
)
def test_a_wrong_document_and_a_needless_mask_show(
    fault: Callable[[pytest.MonkeyPatch], None], shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(cut(3, 9))
    model, reference, engine, _ = start(
        family="llama",
        prepare=lambda model: set_attention(model, VARLEN),
        device=TYPE,
        precision="bf16",
        activations="keep",
        max_grad_norm=None,
    )
    told = {**batch, **told_of(batch["position_ids"]), "use_cache": False}
    with documents(Packed(is_packed=True)):
        expected = reference.forward_backward([told])
    host.native.take_counts()
    with monkeypatch.context() as patch:
        fault(patch)
        loss = engine.forward_backward([batch]).cpu()
    calls = host.native.take_counts().get("varlen attention", 0)
    engine.detach()
    assert (calls == 0) is (shows == "counts")
    if shows != "counts":  # with a mask the loss is another by rounding alone
        assert torch.equal(loss, expected.cpu()) is (shows == "nowhere")
    assert abs(float(loss) - float(expected)) < 1e-2 or shows == "loss"
    assert model.config.num_hidden_layers == (calls or model.config.num_hidden_layers)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_run_on_packed_rows_takes_it_by_default_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dropout: float
) -> None:
    monkeypatch.setattr("megatrain.train.planning.run_machine.measure_matmul_peak", lambda *_: 1e12)
    monkeypatch.setattr("megatrain.stream.machine.measure_matmul_peak", lambda *_: 1e12)
    (tmp_path / "model").mkdir()
    write_model_config(tmp_path / "model", attention_dropout=dropout)
    rows = [{"text": " ".join(WORDS[: 2 + number % 10])} for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = make_config(
        tmp_path,
        train={"device": "auto", "steps": 2, "precision": "bf16"},
        data={"path": str(tmp_path / "rows.jsonl"), "packing": "best_fit", "seq_len": 64},
        optim={"warmup_steps": 1},
        memory={"num_slots": 2, "activations": "keep"},
        checkpoint={"every": 2},
    )
    with caplog.at_level("INFO", "megatrain"):
        train(config)
    counts = host.native.take_counts()
    if dropout:
        assert "varlen attention" not in counts
        assert "varlen cannot do dropout in attention" in caplog.text
    else:  # 2 micro-batches in each of 2 steps pass 3 layers
        assert (counts["varlen attention"], counts["varlen attention backward"]) == (12, 12)
        assert "varlen cannot" not in caplog.text
