"""Ranks on the test device, whose tensors Gloo cannot take: what they exchange goes through the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_ranks
from tests.host_device.on_device.ranks_on_device import train_on_device


@pytest.mark.parity
@pytest.mark.parametrize(
    "settings",
    [
        {"gathers": True},
        {"gathers": True, "precision": "bf16", "updates": "immediate", "max_grad_norm": None},
        {"family": "mixtral", "lockstep": 2, "num_micro_batches": 8},
    ],
    ids=str,
)
def test_ranks_have_the_bits_of_one_device(tmp_path: Path, settings: dict[str, Any]) -> None:
    alone = run_ranks(tmp_path / "1", 1, train_on_device, **settings)[0]
    assert len(set(alone["masters"])) == 3
    for size in (2, 4):
        assert run_ranks(tmp_path / str(size), size, train_on_device, **settings) == [alone] * size
