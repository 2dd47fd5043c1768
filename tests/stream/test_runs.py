"""Gradients that add up in runs, and these by a tree: the same bits wherever the sums wait."""

from __future__ import annotations

from typing import Any

import pytest

from tests.products import pairwise_rows
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


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(map(str, row.values())))
def test_runs_equal_a_tree_of_resident_sums(row: dict[str, Any]) -> None:
    row = dict(row)
    check_parity(row.pop("family"), num_micro_batches=8, steps=1, **row)
