"""One, two and four processes train to the same bits, on one node or on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_ranks
from tests.distributed.training import train


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, ((2, 1), (2, 2))),
        pytest.param({}, ((4, 1), (4, 2), (4, 4)), marks=pytest.mark.parity),
        pytest.param(
            {"family": "mixtral", "lockstep": 2, "num_micro_batches": 8},
            ((2, 1), (4, 1), (4, 2)),
            marks=pytest.mark.parity,
        ),
    ],
    ids=str,
)
def test_any_number_of_ranks_gives_the_same_bits(
    tmp_path: Path, settings: dict[str, Any], sizes: tuple[tuple[int, int], ...]
) -> None:
    alone = run_ranks(tmp_path / "1", 1, train, **settings)[0]
    assert len(set(alone["masters"])) == 3
    assert min(alone["norms"]) > 0.5  # so clipping is active
    for size, num_nodes in sizes:
        place = tmp_path / f"{size}-{num_nodes}"
        for rank, told in enumerate(run_ranks(place, size, train, num_nodes=num_nodes, **settings)):
            assert told == alone, f"rank {rank} of {size} on {num_nodes} nodes"
