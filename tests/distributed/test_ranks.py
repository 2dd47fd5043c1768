"""One, two and four processes train to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_ranks
from tests.distributed.training import train


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (2,)),
        pytest.param({}, (4,), marks=pytest.mark.parity),
        pytest.param(
            {"family": "mixtral", "lockstep": 2, "num_micro_batches": 8}, (2, 4), marks=pytest.mark.parity
        ),
    ],
    ids=str,
)
def test_any_number_of_ranks_gives_the_same_bits(
    tmp_path: Path, settings: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    alone = run_ranks(tmp_path / "1", 1, train, **settings)[0]
    assert len(set(alone["masters"])) == 3
    assert min(alone["norms"]) > 0.5  # so clipping is active
    for size in sizes:
        for rank, told in enumerate(run_ranks(tmp_path / str(size), size, train, **settings)):
            assert told == alone, f"rank {rank} of {size}"
