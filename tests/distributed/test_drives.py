"""Ranks that keep one state on drives: the bits of one rank in RAM, an order that is proved, and commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.layout import drive_chunks
from megatrain.layout.host_buffers import PAGE_BYTES
from megatrain.store.drives import system as calls
from megatrain.store.placement import Tiers
from tests.distributed.threads import Turns
from tests.distributed.training import train
from tests.products import pairwise_rows
from tests.store.disks import Counted

AXES: dict[str, tuple[Any, ...]] = {
    "place": ((0, 0), (2, 0), (9, 2), (9, 9)),
    "size": (2, 4),
    "family": ("llama_tied", "mixtral"),
    "rounds": ((4, 1), (8, 2)),
    "updates": ("deferred", "immediate", "serial"),
    "precision": ("fp32", "bf16"),
    "fragments": (False, True),
}
"""Places are how many blocks have their weights, and how many all of their state, in RAM."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut images so small that every rank has chunks of each block."""
    monkeypatch.setattr(drive_chunks, "CHUNK_BYTES", PAGE_BYTES)
    monkeypatch.setattr(calls, "system", Counted())


def tiers(root: Path, weights: int = 2, state: int = 0, **settings: Any) -> Tiers:
    drives = tuple(root / f"drive{number}" for number in range(2))
    return Tiers(nvme=drives, ram=1 << 30, weights_in_ram=weights, blocks_in_ram=state, **settings)


@pytest.mark.parametrize("row", pairwise_rows(AXES), ids=lambda row: "-".join(map(str, row.values())))
def test_state_on_drives_has_the_bits_of_one_rank_in_ram(row: dict[str, Any], tmp_path: Path) -> None:
    row = dict(row)
    (weights, state), size, (count, lockstep) = row.pop("place"), row.pop("size"), row.pop("rounds")
    settings = row | {"num_micro_batches": count, "lockstep": lockstep, "steps": 2}
    if row["updates"] == "immediate":
        settings["max_grad_norm"] = None
    alone = train(None, **settings)
    there = tiers(tmp_path, weights, state)
    for told in Turns(size).run(lambda ranks: train(ranks, tiers=there, commits=True, **settings)):
        assert told == alone


@pytest.mark.parametrize(
    "settings",
    [
        {"gradients": "nvme", "precision": "bf16"},
        {"gradients": ("host", "nvme", "nvme", "host"), "fragments": True, "num_micro_batches": 8},
        {"boundaries": "nvme", "activations": "recompute", "lockstep": 2},
    ],
    ids=str,
)
def test_what_waits_on_drives_is_each_rank_s_own(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = {name: value for name, value in settings.items() if name not in ("gradients", "boundaries")}
    alone = train(None, **plain, reads=False)
    there = tiers(tmp_path, 9, 4)
    for told in Turns(2).run(lambda ranks: train(ranks, tiers=there, **settings, reads=False)):
        assert told == alone
