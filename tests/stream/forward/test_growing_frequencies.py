"""Rows with rotary frequencies of their own length get those of rows in order, or are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from megatrain.errors import ModelError
from megatrain.stream.evaluate import losses
from tests.families import FAMILIES
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model

FIRST_CONTEXT = 16


def growing_model() -> PreTrainedModel:
    config = FAMILIES["llama"]()
    assert isinstance(config, LlamaConfig)
    config.max_position_embeddings = FIRST_CONTEXT
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return make_model(config)


def batches_of(lengths: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    return [dict(make_batches(1, seed=seed, tokens=tokens)[0]) for seed, tokens in enumerate(lengths)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("lockstep", "lengths"),
    [(1, (20, 40, 30, 50)), (4, (16, 9, 12, 3)), (4, (40, 40, 40, 40)), (4, (12, 20, 12, 12))],
)
def test_rows_in_order_have_the_resident_bits(lockstep: int, lengths: tuple[int, ...]) -> None:
    model = growing_model()
    resident = Resident(model)
    engine = attach_plainly(model, lockstep=lockstep, num_micro_batches=len(lengths))
    for _ in range(2):
        batches = batches_of(lengths)
        assert_same_bits(engine.forward_backward(batches), resident.forward_backward(batches))
        for name, gradient in engine.named_gradients():
            assert_same_bits(gradient, resident.sums[name], name)
        resident.sums.clear()
    engine.detach()


@pytest.mark.parametrize("lengths", [(20, 40, 30, 50), (50, 12, 9, 14), (12, 12, 12, 20)])
def test_unequal_long_rows_of_one_round_are_refused(lengths: tuple[int, ...]) -> None:
    engine = attach_plainly(growing_model(), lockstep=4, num_micro_batches=4)
    with pytest.raises(ModelError, match=r"rope_type dynamic.*use memory\.lockstep=1, or rows of at most 16"):
        engine.forward_backward(batches_of(lengths))
    assert not dict(engine.named_gradients())
    engine.detach()


def test_evaluation_passes_such_rows_one_by_one() -> None:
    lengths = (20, 40, 30, 50)
    model = growing_model().eval()
    resident = growing_model().eval()
    engine = attach_plainly(model, lockstep=4, num_micro_batches=4)
    with torch.no_grad():
        expected = [resident(**batch).loss.item() for batch in batches_of(lengths)]
    assert [loss.item() for loss, _ in losses(engine, batches_of(lengths))] == expected
    engine.detach()
