"""Long rows train in tiles, alone and packed beside shorter documents, with the loss of whole rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatrain.data.flagged_tokens import join_words
from megatrain.data.loader import PackedLoader
from megatrain.data.packing import BestFit
from megatrain.model.documents.begins import set_attention
from megatrain.model.documents.varlen import BY_DOCUMENT
from tests.reference import Batch, Resident, assert_same_bits, attach_plainly, make_model
from tests.stream.runs import HYPER
from tests.tiles import note_calls

TILE, VOCABULARY = 4096, 32


def llama(tokens: int, *, hidden: int = 16, heads: int = 2) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=heads,
        max_position_embeddings=tokens,
        use_cache=False,
    )


def trained(
    config: LlamaConfig, batches: Sequence[Batch], tile_tokens: int | None, interface: str = "sdpa"
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Take a streamed step; return its loss, its gradients, and the masters after it."""
    model = make_model(config)
    set_attention(model, interface)
    engine = attach_plainly(
        model, activations="keep_attention", tile_tokens=tile_tokens, num_micro_batches=len(batches)
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=1.0)
    loss = engine.forward_backward(batches)
    gradients = {name: gradient.clone() for name, gradient in engine.named_gradients()}
    optimizer.step()
    masters = {name: master.clone() for name, master in engine.named_masters()}
    engine.detach()
    return loss, gradients, masters


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Sums of tiles add up in another order than the products of whole rows."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert float((gradient - expected[name]).norm()) <= 1e-5 * float(expected[name].norm()), name


def test_a_row_of_32768_tokens_trains_in_tiles_with_the_loss_of_the_whole_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = 32_768
    ids = torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "labels": ids}]
    whole = Resident(make_model(llama(tokens)), **HYPER)
    expected = whole.forward_backward(batches)
    calls = note_calls(monkeypatch)
    loss, gradients, masters = trained(llama(tokens), batches, TILE)
    assert calls == [tokens] * 3, "attention, the MLP, and the last norm"
    assert math.isfinite(loss)
    assert_same_bits(loss, expected, "loss")
    assert_near(gradients, whole.sums)
    whole.step(whole.norm(), 1.0)
    for name, master in masters.items():
        torch.testing.assert_close(master, whole.master(name), rtol=0, atol=1e-5, msg=name)


def packed_step(long: int, short: int) -> list[Batch]:
    """Return a step of a loader: a document of `long` tokens is a row, shorter ones are packed to another."""
    packer = BestFit(long, fill_id=0)
    chance = np.random.default_rng(0)
    rows: list[Any] = []
    for length in [short] * 3 + [long] + [short] * (long // short - 3):
        words = join_words(chance.integers(3, VOCABULARY, length), np.ones(length, dtype=bool))
        rows += chain.from_iterable(packer.add(words))
    rows += chain.from_iterable(packer.finish())
    assert len(rows) == 2
    loader = PackedLoader(
        np.stack(rows), micro_batch_size=1, num_micro_batches=2, seed=0, shuffle=False, packing="best_fit"
    )
    step: list[Batch] = [*next(loader)]
    begins = [int((batch["position_ids"] == 0).sum()) for batch in step]
    assert sorted(begins) == [1, long // short]
    return step


def check_packed(config: LlamaConfig, long: int, short: int) -> None:
    """The long row and the short ones pass in tiles, and the step's loss is that of whole rows."""
    batches = packed_step(long, short)
    loss, gradients, _ = trained(config, batches, TILE, BY_DOCUMENT)
    expected, of_whole, _ = trained(config, batches, None, BY_DOCUMENT)
    assert math.isfinite(loss)
    assert_same_bits(loss, expected, "loss")
    assert_near(gradients, of_whole)


@pytest.mark.parametrize(
    ("long", "short"),
    [
        (1 << 14, 1 << 11),
        pytest.param(1 << 19, 1 << 13, marks=[pytest.mark.parity, pytest.mark.timeout(3600)]),
    ],
)
def test_a_long_document_among_short_ones_trains_in_tiles(long: int, short: int) -> None:
    check_packed(llama(long, heads=1), long, short)


@pytest.mark.parametrize("long", [1 << 17, pytest.param(1 << 19, marks=pytest.mark.parity)])
def test_a_long_row_among_rows_of_8k_trains_where_attention_is_short(
    monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    """Attention looks back within 512 tokens, so that its time grows with the row and not with its square."""
    short, reach = 1 << 13, 512

    def attend(_: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        starts = more.get("cu_seq_lens_q", torch.tensor([0]))
        assert mask is None
        assert not (starts % reach).any(), "documents begin where stretches do"
        q, k, v = (each[0].unflatten(1, (-1, reach)).transpose(0, 1) for each in (query, key, value))
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=more["scaling"])
        return output.transpose(1, 2).flatten(0, 1)[None], None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, BY_DOCUMENT, attend)
    calls = note_calls(monkeypatch)
    check_packed(llama(long, hidden=8, heads=1), long, short)
    assert calls == [long] * 6
