"""One, two and four processes train to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_ranks
from tests.distributed.training import train


@pytest.mark.parametrize(
    "settings",
    [{}, {"family": "mixtral", "lockstep": 2, "num_micro_batches": 8}],
    ids=str,
)
def test_any_number_of_ranks_gives_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    alone = run_ranks(tmp_path / "1", 1, train, **settings)[0]
    assert len(set(alone["masters"])) == 3
    assert min(alone["norms"]) > 0.5  # so clipping is active
    for size in (2, 4):
        for rank, told in enumerate(run_ranks(tmp_path / str(size), size, train, **settings)):
            assert told == alone, f"rank {rank} of {size}"
