"""Ranks in one process: the same bits over settings, and an order that is proved among all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.stream.lanes.base import OrderingError
from tests.distributed.threads import ThreadRanks, Turns
from tests.distributed.training import train
from tests.products import pairwise_rows

AXES: dict[str, tuple[Any, ...]] = {
    "family": ("llama_tied", "mixtral", "gpt2", "jamba", "gemma2"),
    "size": (2, 4),
    "rounds": ((4, 1), (4, 4), (8, 2), (12, 1)),
    "activations": ("keep", "recompute", "offload"),
    "fragments": (False, True),
    "outer_streams": (False, True),
    "updates": ("deferred", "immediate", "serial"),
    "precision": ("fp32", "bf16"),
    "dropout": (False, True),
    "padded": (False, True),
}
"""Rounds are micro-batches of a step, and how many of them are in lockstep, at most."""


def settings_of(row: dict[str, Any]) -> dict[str, Any]:
    row = dict(row)
    count, lockstep = row.pop("rounds")
    del row["size"]
    if row["updates"] == "immediate":
        row["max_grad_norm"] = None
    if row["family"] in ("llama_tied", "gpt2", "gemma2"):
        row["outer_streams"] = False  # they are tied
    return row | {"num_micro_batches": count, "lockstep": lockstep, "steps": 2}


@pytest.mark.parametrize("row", pairwise_rows(AXES), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_settings_has_the_bits_of_one_rank(row: dict[str, Any]) -> None:
    settings = settings_of(row)
    alone = train(None, **settings)
    for told in Turns(row["size"]).run(lambda ranks: train(ranks, **settings)):
        assert told == alone
