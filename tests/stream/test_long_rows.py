"""Steps in which one row is far longer than others: the same bits, and the loss is the mean over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.families import FAMILIES
from tests.reference import Batch
from tests.stream.runs import assert_same_masters, assert_same_round, start

LONG, SHORT = 1536, 24


def one_long_row(seed: int, place: int) -> list[Batch]:
    """Return four micro-batches: three of a short row, and one of a row of 64 times its length."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[Batch] = []
    for number in range(4):
        ids = torch.randint(3, 128, (1, LONG if number == place else SHORT), generator=generator)
        labels = ids.clone()
        labels[:, : SHORT // 2] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"lockstep": 4, "activations": "recompute", "boundaries": "host"},
        {"lockstep": 2, "activations": "offload"},
        {"lockstep": 2, "activations": "keep_attention", "boundaries": "host", "head_chunk_tokens": 500},
        {"lockstep": 1, "activations": "keep"},
    ],
)
def test_one_long_row_among_short_ones_trains_as_resident(settings: dict[str, Any], place: int) -> None:
    config = FAMILIES["llama"]()
    config.max_position_embeddings = LONG
    _, reference, engine, optimizer = start(config=config, num_slots=2, num_micro_batches=4, **settings)
    chunked = "head_chunk_tokens" in settings
    for step in range(2):
        batches = one_long_row(step, (place + step) % 4)
        if chunked:  # rounded in another order
            expected = reference.forward_backward(batches)
            assert float(engine.forward_backward(batches)) == pytest.approx(float(expected), rel=1e-6)
            continue
        loss = assert_same_round(engine, reference, batches)
        with torch.no_grad():
            total = sum(
                float(reference.model(**batch).loss) * int((batch["labels"][:, 1:] != -100).sum())
                for batch in batches
            )
        count = 3 * (SHORT - SHORT // 2) + LONG - SHORT // 2
        assert float(loss) == pytest.approx(total / count, rel=1e-5), "long rows count by their tokens"
        stats = optimizer.step()
        reference.step(stats.grad_norm, 0.5)
    if not chunked:
        assert_same_masters(engine, reference)
