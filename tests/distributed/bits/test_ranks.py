"""One, two and four processes train to the same bits, on one node or on several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import AXES
from tests.distributed.crew import Crew
from tests.distributed.processes import run_ranks
from tests.distributed.training import train, train_row
from tests.products import pairwise_rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"gathers": True, "device": "emulated"}, ((2, 1), (2, 2))),
        ({"resident_layers": 4, "gradients": "device", "device": "emulated", "precision": "bf16"}, ((2, 1),)),
        (
            {"resident_layers": 2, "mirror_resident": False, "device": "emulated", "precision": "bf16"},
            ((2, 1), (2, 2)),
        ),
        pytest.param({}, ((4, 1), (4, 2), (4, 4)), marks=pytest.mark.parity),
        pytest.param(
            {
                "gathers": True,
                "device": "emulated",
                "precision": "bf16",
                "updates": "immediate",
                "max_grad_norm": None,
            },
            ((2, 1), (4, 1), (4, 2)),
            marks=pytest.mark.parity,
        ),
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
    assert min(alone["norms"]) > 0.5  # so clipping, where there is any, is active
    for size, num_nodes in sizes:
        place = tmp_path / f"{size}-{num_nodes}"
        for rank, told in enumerate(run_ranks(place, size, train, num_nodes=num_nodes, **settings)):
            assert told == alone, f"rank {rank} of {size} on {num_nodes} nodes"


def test_any_number_of_ranks_gives_the_same_bits_of_rows_in_tiles(tmp_path: Path) -> None:
    """Sums of tiles add up in fp32 to those of micro-batches, and these to those of ranks."""
    settings: dict[str, Any] = {"family": "llama", "tile_tokens": 5, "gathers": True, "device": "emulated"}
    settings |= {"precision": "bf16", "activations": "keep_attention"}
    alone, whole = train(None, **settings), train(None, **settings | {"tile_tokens": None})
    assert alone["losses"][0] == whole["losses"][0]
    assert alone["gradients"][0] != whole["gradients"][0], "tiles round sums otherwise"
    for told in run_ranks(tmp_path / "2", 2, train, num_nodes=2, **settings):
        assert told == alone


FAMILIES = ("llama", "llama_tied", "mixtral", "gpt2", "jamba", "gemma2", "deepseek_v3", "qwen3_next")
ROWS = pairwise_rows({name: values for name, values in AXES.items() if name not in ("family", "ranks")})


@pytest.mark.parity
@pytest.mark.parametrize("number", range(len(ROWS)))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_settings_has_the_bits_of_one_rank(
    standing: Callable[[int], Crew], family: str, number: int
) -> None:
    row = ROWS[number] | {"family": family, "ranks": (4, 1)}
    crews = [standing(size) for size in (1, 2, 4)]
    for crew in crews:
        crew.order(train_row, row=row)
    (alone,), *shared = [crew.answers() for crew in crews]
    assert len(set(alone["masters"])) == 3
    for several in shared:
        assert several == [alone] * len(several), f"of {len(several)} ranks: {row}"
