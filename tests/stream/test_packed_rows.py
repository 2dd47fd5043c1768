"""Rows of several documents: each token's loss is that of its document alone, through the engine."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatrain.data.flagged_tokens import IDS, TRAINED, Words, join_words
from megatrain.data.loader import as_batch
from megatrain.data.packing import BestFit, best_fit
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_model

LENGTHS = (9, 14, 5, 21, 3, 12)
"""Some longer than the window of 8 that gemma2, qwen2 and mixtral have here."""


def make_documents() -> list[Words]:
    generator = np.random.default_rng(0)
    return [
        join_words(generator.integers(3, 120, length), np.arange(length) >= length // 3) for length in LENGTHS
    ]


def make_rows(documents: list[Words]) -> dict[str, Tensor]:
    packer = BestFit(32, fill_id=0)
    rows = [rows for words in documents for rows in packer.add(words)] + list(packer.finish())
    return as_batch(np.concatenate(rows), "best_fit")


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the losses of what is trained on, in order."""
    losses = cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
    )
    return losses[labels[:, 1:].flatten() != -100]


def make_config(family: str) -> Any:
    config = FAMILIES[family]()
    config.output_router_logits = False  # of whole rows, and not of tokens
    return config


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2", "mixtral"])
def test_packed_equals_unpacked(family: str) -> None:
    model = make_model(make_config(family))
    reference = copy.deepcopy(model).eval()
    documents = make_documents()
    batch = make_rows(documents)
    assert batch["input_ids"].shape == (3, 32)

    alone = []
    with torch.no_grad():
        for words in (documents[number] for row in best_fit(LENGTHS, 32) for number in row):
            ids = torch.from_numpy(words & IDS).long()[None]
            labels = torch.where(torch.from_numpy(words & TRAINED != 0), ids, -100)
            alone.append(token_losses(reference(input_ids=ids, use_cache=False).logits, labels))
    expected = torch.cat(alone)

    engine = attach_plainly(model.eval())
    with torch.no_grad():
        losses = token_losses(model(**batch).logits, batch["labels"])
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    loss = engine.forward_backward([batch])
    torch.testing.assert_close(loss, expected.mean(), rtol=0, atol=1e-5)
    engine.detach()


def test_with_a_cache_transformers_lets_documents_see_each_other() -> None:
    """Why the engine switches it off; were it no longer so, the engine need not."""
    model = make_model(make_config("llama")).eval()
    batch = make_rows(make_documents())
    with torch.no_grad():
        apart = model(**batch, use_cache=False).logits
        cached = model(**batch, use_cache=True).logits
        engine = attach_plainly(model)
        attached = model(**batch).logits
    assert float((cached - apart).abs().max()) > 1e-2
    torch.testing.assert_close(attached, apart, rtol=0, atol=1e-5)
    engine.detach()
