"""Ranks that keep one state on drives: the bits of one rank in RAM, an order that is proved, and commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config.choice import StepBatch
from megatrain.errors import CapacityError, RankError
from megatrain.layout import drive_chunks
from megatrain.layout.host_buffers import PAGE_BYTES
from megatrain.plan.program.kinds import Lane
from megatrain.store.drives import system as calls
from megatrain.store.drives.record import read_record
from megatrain.store.placement import Tiers
from megatrain.stream.lanes.base import OrderingError
from tests.distributed.cases import cut_at
from tests.distributed.processes import exit_codes, run_ranks
from tests.distributed.runs import train_on_drives, train_run
from tests.distributed.threads import RankLanes, ThreadRanks, Turns
from tests.distributed.training import train
from tests.families import FAMILIES
from tests.products import pairwise_rows
from tests.reference import attach_plainly, make_batches, make_model
from tests.store.disks import Counted
from tests.stream.runs import HYPER
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
    root.mkdir(exist_ok=True)
    drives = tuple(root / f"drive{number}" for number in range(2))
    return Tiers(nvme=drives, ram=1 << 30, weights_in_ram=weights, blocks_in_ram=state, **settings)


ROWS = [
    pytest.param(row, marks=pytest.mark.parity if number >= 3 else (), id="-".join(map(str, row.values())))
    for number, row in enumerate(pairwise_rows(AXES))
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", ROWS)
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
        {"gradients": "nvme", "boundaries": "nvme", "activations": "recompute", "precision": "bf16"},
        pytest.param(
            {"gradients": ("host", "nvme", "nvme", "host"), "fragments": True, "num_micro_batches": 8},
            marks=pytest.mark.parity,
        ),
        pytest.param(
            {"boundaries": "nvme", "activations": "recompute", "lockstep": 2}, marks=pytest.mark.parity
        ),
    ],
    ids=str,
)
def test_what_waits_on_drives_is_each_rank_s_own(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = {name: value for name, value in settings.items() if name not in ("gradients", "boundaries")}
    alone = train(None, **plain, reads=False, steps=2)
    there = tiers(tmp_path, 9, 4)
    for told in Turns(2).run(lambda ranks: train(ranks, tiers=there, **settings, reads=False, steps=2)):
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fault", "size", "num_nodes"),
    [
        *((fault, 2, 1) for fault in (*WAITS, *MEETINGS)),
        *(pytest.param(fault, 4, 2, marks=pytest.mark.parity) for fault in (*WAITS, *MEETINGS)),
    ],
)
def test_a_missing_wait_on_drives_is_found(fault: str, size: int, num_nodes: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 2, "reads": False, "commits": True, "tiers": tiers(tmp_path)}
    if fault == "an update of what another rank spills":  # a norm would wait for it
        settings |= {"tiers": tiers(tmp_path, 9, 9), "updates": "immediate", "max_grad_norm": None}

    def faulty(ranks: ThreadRanks) -> Any:
        hasty = HastyRanks(ranks.turns, ranks.rank)
        hasty.hasty_lane = MEETINGS.get(fault, "")
        lanes = RankLanes(ranks.turns, ranks.rank, skips=WAITS.get(fault))
        return train(hasty, device=lanes, **settings)

    with cut_at(320), pytest.raises(OrderingError, match="without waiting"):
        Turns(size, num_nodes).run(faulty)


def test_weights_that_the_first_rank_writes_are_those_of_all(tmp_path: Path) -> None:
    """Though every rank has read the old ones from the drives."""
    there, name = tiers(tmp_path, 0, 0), "model.layers.1.mlp.up_proj.weight"

    def write(ranks: Any) -> float:
        device = RankLanes(ranks.turns, ranks.rank)
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=2, num_runs=2)
        model = make_model(FAMILIES["llama_tied"]())
        engine = attach_plainly(model, device=device, batch=batch, ranks=ranks, tiers=there)
        engine.sync()
        ranks.meet()
        if ranks.rank == 0:
            engine.host.put(name, torch.full_like(model.get_parameter(name), 0.25))
        engine.weights_changed()
        ranks.meet()
        engine.sync()
        found = dict(engine.named_masters())[name], model.get_parameter(name).float()
        engine.close()
        assert torch.equal(*found)
        return float(found[0].sum() / found[0].numel())

    assert Turns(2).run(write) == [0.25, 0.25]


SHORT: dict[str, Any] = {
    "train": {"steps": 4, "precision": "fp32"},
    "eval": {"every": None},
    "checkpoint": {"every": None},
}


RAM = {1: 1_850_000, 2: 2_910_000, 4: 4_000_000}
"""Bytes by number of ranks, each of which computes: some of the state has no room there."""


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
        pytest.param((2, 4), [0, 200], marks=pytest.mark.parity),
        pytest.param((4, 2), [2, 90], marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_a_rank_killed_at_a_drive_goes_on_from_the_last_commit_with_any_number(
    tmp_path: Path, alone: Path, sizes: tuple[int, int], killed: list[int]
) -> None:
    out = f"run-{sizes[0]}-{sizes[1]}"
    place = {"root": str(alone.parent), "out": out, **SHORT}
    first, then = ({**place, "ram": RAM[size]} for size in sizes)
    codes = exit_codes(tmp_path / "first", sizes[0], train_on_drives, killed=killed, **first)
    assert codes.pop(killed[0]) == -9
    assert set(codes) <= {RankError.exit_code, 6}
    run = alone.parent / out
    assert not list(run.glob("checkpoints/*"))
    committed = read_record(alone.parent / f"{out}-drive0")
    assert committed is not None
    assert 1 <= committed.step < 4
    assert run_ranks(tmp_path / "then", sizes[1], train_on_drives, **then)[0] > 0
    assert_same_runs(run, alone)


@pytest.mark.parity
def test_a_rank_whose_drive_is_full_ends_all_in_one_sentence_and_the_run_goes_on(
    tmp_path: Path, alone: Path
) -> None:
    place: dict[str, Any] = {"root": str(alone.parent), "out": "full", "ram": RAM[2], **SHORT}
    codes = exit_codes(tmp_path / "first", 2, train_on_drives, killed=[1, 180], how="full", **place)
    said = (tmp_path / "first/errors").read_text()
    assert codes[1] == CapacityError.exit_code, said
    assert codes[0] in (RankError.exit_code, 6)  # 6: some of its blocks are updated, others are not
    assert "Traceback" not in said
    assert "rank 0: rank 1 (process " in said
    assert f"has ended: cannot write {alone.parent}/full-drive" in said
    assert "No space left on device; free some space there" in said
    assert run_ranks(tmp_path / "then", 2, train_on_drives, **place)[0] > 0
    assert_same_runs(alone.parent / "full", alone)


def count(ranks: Any, there: Tiers) -> list[list[int]]:
    """Train two steps, and return the bytes that drives have read and written: by the program, and by it."""
    device = "cpu" if ranks is None else RankLanes(ranks.turns, ranks.rank)
    batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=2, num_runs=2)
    model = make_model(FAMILIES["llama_tied"]())
    engine = attach_plainly(model, device=device, batch=batch, ranks=ranks, tiers=there)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    store = engine.executor.drives.on_drives.store
    before = [store.read_bytes, store.written_bytes]
    own = slice(None) if ranks is None else slice(ranks.rank, ranks.rank + 1)
    for step in range(2):
        engine.forward_backward(make_batches(2, seed=step)[own])
        optimizer.step()
        engine.commit(step, {})
    engine.settle()
    counts = engine.counts
    moved = [after - at for after, at in zip([store.read_bytes, store.written_bytes], before, strict=True)]
    engine.close()
    return [[counts.drive_read_bytes, counts.drive_write_bytes], moved]


def test_ranks_move_the_bytes_of_one_rank_and_their_programs_say_which(tmp_path: Path) -> None:
    planned, moved = count(None, tiers(tmp_path / "alone", 9))
    assert planned == moved
    found = Turns(2).run(lambda ranks: count(ranks, tiers(tmp_path / "two", 9)))
    for of_rank, by_drives in found:
        assert of_rank == by_drives
    parts = [by_drives for _, by_drives in found]
    assert [sum(both) for both in zip(*parts, strict=True)] == moved
    for one, other in zip(*parts, strict=True):
        assert 0.8 < one / other < 1.25
