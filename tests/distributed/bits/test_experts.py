"""Experts in chunks on several ranks: the bits of one rank, whatever each of them fetches and keeps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import cut_at
from tests.distributed.threads import Turns
from tests.distributed.training import train

CASES: dict[str, dict[str, Any]] = {
    "two ranks": {"family": "qwen3_moe", "ranks": (2, 1)},
    "two nodes": {"family": "gpt_oss", "ranks": (2, 2), "precision": "bf16"},
    "each fetches a piece": {"family": "glm4_moe", "ranks": (2, 1), "gathers": True},
    "few tokens": {"family": "deepseek_v3", "ranks": (4, 1), "data": "one word", "lockstep": 1},
    "gradients on the device": {"family": "mixtral", "ranks": (2, 1), "gradients": "device", "lockstep": 4},
    "resident layers": {"family": "olmoe", "ranks": (2, 1), "resident_layers": 1, "activations": "keep"},
}


@pytest.mark.parametrize("name", list(CASES))
def test_ranks_have_the_bits_of_one(name: str) -> None:
    settings = {"expert_chunks": 4, "lockstep": 2, "steps": 2, "num_micro_batches": 4, **CASES[name]}
    size = settings.pop("ranks")
    with cut_at(2048):
        alone = train(None, **settings)
        for told in Turns(*size).run(lambda ranks: train(ranks, **settings)):
            assert told == alone
