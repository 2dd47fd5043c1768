"""Attention by tiles on the test device: no mask, no scores of whole rows, and nothing that is read back."""

from __future__ import annotations

import pytest
from transformers import PretrainedConfig

from megatrain.config.attention import TILED
from megatrain.model.documents.begins import Packed, documents, set_attention
from tests.families import FAMILIES
from tests.host_device.device import TYPE, register
from tests.model.documents.test_varlen import batch_of, cut
from tests.reference import assert_same_bits
from tests.stream.runs import start

host = register()


def config_of(family: str) -> PretrainedConfig:
    config = FAMILIES[family]()
    config.sliding_window = 24
    return config


@pytest.mark.sampled(3)
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "keep_attention"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mixtral"])
def test_packed_rows_stream_to_the_bits_of_a_resident_model(
    family: str, precision: str, activations: str
) -> None:
    batch = batch_of(cut(3, 9))
    _, reference, engine, optimizer = start(
        config=config_of(family),
        prepare=lambda model: set_attention(model, TILED),
        device=TYPE,
        precision=precision,
        activations=activations,
        max_grad_norm=None,
    )
    own = batch["position_ids"].numpy()
    with documents(Packed(is_packed=True, positions=own)):
        expected = reference.forward_backward([{**batch, "use_cache": False}])
    host.native.delay(6, 0.1, 3e-4, 1e-4)
    loss = engine.forward_backward([batch])
    assert_same_bits(loss.cpu(), expected.cpu())
    norm = float(optimizer.step().grad_norm)
    assert norm == pytest.approx(reference.norm(), rel=1e-6)
    reference.step(norm, None)
    for name, master in engine.named_masters():
        assert_same_bits(master, reference.master(name), name)
    engine.detach()
