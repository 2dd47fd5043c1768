"""Ranks that keep one state on drives: the bits of one rank in RAM, an order that is proved, and commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import RankError
from megatrain.layout import drive_chunks
from megatrain.layout.host_buffers import PAGE_BYTES
from megatrain.plan.program.operations import Lane
from megatrain.store.drives import system as calls
from megatrain.store.drives.record import read_record
from megatrain.store.placement import Tiers
from megatrain.stream.lanes.base import OrderingError
from tests.distributed.processes import exit_codes, run_ranks
from tests.distributed.runs import train_on_drives, train_run
from tests.distributed.threads import RankLanes, ThreadRanks, Turns
from tests.distributed.training import train
from tests.products import pairwise_rows
from tests.store.disks import Counted
from tests.train.test_loop import assert_same_runs

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


WAITS = {
    "an update before its rank has read": (Lane.HOST, "drive_staging"),
    "a write before all ranks have updated": (Lane.WRITE, "drive_staging"),
    "a read over what is still to be written": (Lane.READ, "drive_staging"),
    "weights read before they are on the drives": (Lane.PAGE, "drive"),
}
MEETINGS = {
    "an update before other ranks have read": "read",
    "a commit before other ranks have written": "write",
    "an update of what another rank spills": "norm",
}


class HastyRanks(ThreadRanks):
    """Ranks that do not wait for each other in a lane: a fault."""

    hasty_lane = ""

    def meet(self, lane: str = "caller") -> None:
        if lane != self.hasty_lane:
            super().meet(lane)


@pytest.mark.parametrize("fault", [*WAITS, *MEETINGS])
def test_a_missing_wait_on_drives_is_found(fault: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 2, "reads": False, "commits": True, "tiers": tiers(tmp_path)}
    if fault == "an update of what another rank spills":  # a norm would wait for it
        settings |= {"tiers": tiers(tmp_path, 9, 9), "updates": "immediate", "max_grad_norm": None}

    def faulty(ranks: ThreadRanks) -> Any:
        hasty = HastyRanks(ranks.turns, ranks.rank)
        hasty.hasty_lane = MEETINGS.get(fault, "")
        lanes = RankLanes(ranks.turns, ranks.rank, skips=WAITS.get(fault))
        return train(hasty, device=lanes, **settings)

    with pytest.raises(OrderingError, match="without waiting"):
        Turns(2).run(faulty)


SHORT: dict[str, Any] = {"train": {"steps": 4}, "eval": {"every": None}, "checkpoint": {"every": None}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on one rank, with the state in RAM."""
    root = tmp_path_factory.mktemp("alone")
    memory = {"activations": "recompute", "fragments": False}
    run_ranks(root / "logs", 1, train_run, root=str(root), out="run", memory=memory, **SHORT)
    return root / "run"


@pytest.mark.parametrize(
    ("sizes", "killed"),
    [
        ((2, 1), [1, 180]),
        pytest.param((1, 2), [0, 620], marks=pytest.mark.parity),
        pytest.param((2, 4), [0, 400], marks=pytest.mark.parity),
        pytest.param((4, 2), [2, 90], marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_a_rank_killed_at_a_drive_goes_on_from_the_last_commit_with_any_number(
    tmp_path: Path, alone: Path, sizes: tuple[int, int], killed: list[int]
) -> None:
    out = f"run-{sizes[0]}-{sizes[1]}"
    place = {"root": str(alone.parent), "out": out, "ram": 1_850_000, **SHORT}
    codes = exit_codes(tmp_path / "first", sizes[0], train_on_drives, killed=killed, **place)
    assert codes.pop(killed[0]) == -9
    assert set(codes) <= {RankError.exit_code, 6}
    run = alone.parent / out
    assert not list(run.glob("checkpoints/*"))
    committed = read_record(alone.parent / f"{out}-drive0")
    assert committed is not None
    assert 1 <= committed.step < 4
    assert run_ranks(tmp_path / "then", sizes[1], train_on_drives, **place)[0] > 0
    assert_same_runs(run, alone)
