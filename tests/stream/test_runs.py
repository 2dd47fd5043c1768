"""Gradients that add up in runs, and these by a tree: the same bits wherever the sums wait."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families import FAMILIES
from tests.products import pairwise_rows
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import check_parity

AXES: dict[str, tuple[Any, ...]] = {
    "num_runs": (2, 4, 8),
    "lockstep": (1, 2, 3, 8),
    "family": ("llama_tied", "mixtral", "gpt2", "jamba"),
    "activations": ("keep", "recompute", ("recompute", "drop_boundary") * 2),
    "fragments": (False, True),
    "resident_layers": (0, 2, 4),
    "outer_streams": (False, True),
    "updates": ("deferred", "immediate", "serial"),
    "gradients": ("host", "device"),
    "device": ("checked", "emulated"),
    "dropout": (False, True),
}
"""Eight micro-batches a step: runs are shorter and longer than rounds, and no multiples of them."""


def rows() -> list[dict[str, Any]]:
    found = []
    for row in pairwise_rows(AXES):
        if row["updates"] == "immediate":
            row["max_grad_norm"] = None
            row["gradients"] = "host"
        if row["resident_layers"] == 4:
            row["outer_streams"] = False
        found.append(row)
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(map(str, row.values())))
def test_runs_equal_a_tree_of_resident_sums(row: dict[str, Any]) -> None:
    row = dict(row)
    check_parity(row.pop("family"), num_micro_batches=8, steps=1, **row)


def gradients_of_chunks(family: str, lockstep: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"num_micro_batches": 4, "num_runs": 4, "head_chunk_tokens": 8}
    engine = attach_plainly(make_model(FAMILIES[family]()), lockstep=lockstep, **settings)
    engine.forward_backward(make_batches(4))
    return dict(engine.named_gradients())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_chunks_of_a_head_belong_to_the_run_of_their_micro_batch(family: str) -> None:
    """In lockstep all micro-batches have begun before the head of any of them runs."""
    together = gradients_of_chunks(family, 4)
    for name, gradient in gradients_of_chunks(family, 1).items():
        assert_same_bits(together[name], gradient, name)
