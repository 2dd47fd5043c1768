"""Several nodes with drives of their own: the bits of one rank in RAM, and commits that are of all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import megatrain
from megatrain.config.choice import StepBatch
from megatrain.config.optimizers import adamw
from megatrain.errors import CheckpointError, RankError
from megatrain.layout import drive_chunks, pools
from megatrain.layout.host_buffers import PAGE_BYTES
from megatrain.model.adapters.files import WEIGHTS_NAME
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.memory.host_pools import drive_pools, host_pools
from megatrain.store.drives import system as calls
from megatrain.store.drives.record import RECORD_NAME
from megatrain.store.placement import Tiers
from megatrain.train.adapters import write_adapter
from megatrain.train.resume.state import lend_state, read_state, write_state
from tests.distributed.cases import TRAINED, cut_at
from tests.distributed.processes import exit_codes, run_ranks
from tests.distributed.runs import train_on_drives, train_run
from tests.distributed.state.test_drives import SHORT, tiers
from tests.distributed.threads import RankLanes, ThreadRanks, Turns
from tests.distributed.training import digest_of, train
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.store.disks import Counted
from tests.stream.runs import HYPER
from tests.train.test_loop import assert_same_runs

CUT = 320
"""Elements: every node has a part of each block, and none ends with a page."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut images so that every rank has chunks of each block, and state so that it has a share."""
    monkeypatch.setattr(drive_chunks, "CHUNK_BYTES", PAGE_BYTES)
    monkeypatch.setattr(calls, "system", Counted())
    with cut_at(CUT):
        yield


@pytest.mark.parametrize(
    ("size", "place", "settings"),
    [
        (2, (2, 0), {"precision": "bf16"}),
        pytest.param(4, (0, 0), {"precision": "bf16", "family": "mixtral"}, marks=pytest.mark.parity),
        pytest.param(2, (9, 2), {"fragments": True, "num_micro_batches": 8}, marks=pytest.mark.parity),
        pytest.param(4, (9, 9), {"updates": "immediate", "max_grad_norm": None}, marks=pytest.mark.parity),
        pytest.param(2, (2, 0), {"gradients": "nvme", "reads": False}, marks=pytest.mark.parity),
        pytest.param(4, (2, 0), {"trained": "adapters"}, marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_two_nodes_have_the_bits_of_one_rank_in_ram(
    size: int, place: tuple[int, int], settings: dict[str, Any], tmp_path: Path
) -> None:
    plain = {name: value for name, value in settings.items() if name != "gradients"}
    alone = train(None, steps=2, **plain)
    there = tiers(tmp_path, *place)
    for told in Turns(size, 2).run(
        lambda ranks: train(ranks, tiers=there, steps=2, commits=True, **settings)
    ):
        assert told == alone
    for number in range(2):
        names = sorted(path.name for path in (tmp_path / f"drive{number}").iterdir())
        assert names == ["node-0", "node-1"]


class Stopped(Exception):
    """A node that has ended in the middle of a commit."""


class Renames(Counted):
    """End at one of the renames of records: of two nodes' `prepared.json`, then of their `commit.json`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at, self.num_renames = at, 0

    def rename(self, source: Path, target: Path) -> None:
        self.num_renames += 1
        if self.num_renames == self._at:
            raise Stopped
        super().rename(source, target)


def train_to(ranks: Any, last: int, there: Tiers | None) -> tuple[int, str]:
    """Train to a step, from what is committed; return where it went on from, and a digest of the masters."""
    device = "cpu" if ranks is None else RankLanes(ranks.turns, ranks.rank)
    settings: dict[str, Any] = {"precision": "bf16", "ranks": ranks, "tiers": there}
    settings["batch"] = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=4, num_runs=4)
    model = megatrain.load(config=FAMILIES["llama_tied"](), **settings)
    engine = attach_plainly(model.train(), device=device, **settings)
    try:
        optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
        own, first = engine.parts(4)[0 if ranks is None else ranks.rank], 0
        if there is not None and there.resumes:
            record = engine.host.record
            assert record is not None
            first = record.step
            optimizer.steps = {name: int(count) for name, count in record.meta["steps"].items()}
        for step in range(first + 1, last + 1):
            batches = make_batches(4, seed=step)
            engine.forward_backward([batches[number] for number in own])
            optimizer.step()
            if there is not None:
                engine.commit(step, {}, finish=lambda: {"steps": dict(optimizer.steps)})
        return first, digest_of(dict(engine.named_masters()))
    finally:
        engine.close()


@pytest.fixture(scope="module")
def alone() -> str:
    """Train on one rank, with the state in RAM."""
    with cut_at(CUT):
        return train_to(None, 3, None)[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("at", "place", "first"),
    [
        pytest.param(5, (9, 2), 1, marks=pytest.mark.parity),
        (6, (9, 2), 1),
        (7, (2, 0), 2),
        (8, (9, 2), 2),
        pytest.param(9, (2, 0), 2, marks=pytest.mark.parity),
    ],
)
def test_a_node_that_ends_within_a_commit_goes_on_with_the_others(
    at: int, place: tuple[int, int], first: int, alone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has ended, before its record was prepared or committed: all go on from one step."""
    there = tiers(tmp_path, *place)
    monkeypatch.setattr(calls, "system", Renames(at))
    with pytest.raises(Stopped):
        Turns(2, 2).run(lambda ranks: train_to(ranks, 3, there))
    monkeypatch.setattr(calls, "system", Counted())
    again = replace(there, resumes=True)
    assert Turns(2, 2).run(lambda ranks: train_to(ranks, 3, again)) == [(first, alone)] * 2


def test_a_lost_drive_and_other_nodes_are_named(tmp_path: Path) -> None:
    there = tiers(tmp_path)
    Turns(2, 2).run(lambda ranks: train_to(ranks, 1, there))
    again = replace(there, resumes=True)
    with pytest.raises(CheckpointError, match=r"of another model, .* or of other nodes"):
        Turns(4, 2).run(lambda ranks: train_to(ranks, 2, again))
    other = tiers(tmp_path / "other")
    Turns(2, 2).run(lambda ranks: train_to(ranks, 1, other))
    mixed = replace(there, nvme=other.nvme, resumes=True)
    with pytest.raises(CheckpointError, match=r"step 1, node 1 holds step 1, of several starts of the run\)"):
        Turns(2, 2).run(lambda ranks: train_to(ranks, 2, mixed if ranks.node else again))
    record = tmp_path / f"drive0/node-1/{RECORD_NAME}"
    record.rename(record.with_suffix(".lost"))
    with pytest.raises(CheckpointError, match=r"\(node 0 holds step 1, node 1 holds none\)"):
        Turns(2, 2).run(lambda ranks: train_to(ranks, 2, again))


def test_a_node_moves_and_keeps_the_bytes_that_the_plan_says(tmp_path: Path) -> None:
    """Of 2 ranks on 2 nodes, for 3 blocks' weights and 2 blocks' state in RAM, but for what was frozen."""
    there, tokens = tiers(tmp_path, 3, 2), 17  # in no other test: plans keep what they have counted
    batch = StepBatch(micro_batch_size=2, seq_len=tokens, num_micro_batches=2, num_runs=2)
    anatomy = count_anatomy(
        FAMILIES["llama_tied"](), micro_batch_size=2, seq_len=tokens, precision="bf16", device_type="cpu"
    )

    def run(ranks: Any) -> Any:
        device = RankLanes(ranks.turns, ranks.rank)
        settings: dict[str, Any] = {"precision": "bf16", "batch": batch, "ranks": ranks, "tiers": there}
        engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=device, **settings)
        optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
        store, counts = engine.executor.drives.on_drives.store, engine.counts
        before = [store.read_bytes, store.written_bytes]
        for step in range(2):
            engine.forward_backward(make_batches(1, seed=step, tokens=tokens))
            optimizer.step()
            engine.commit(step, {})
        engine.settle()
        moved = [store.read_bytes - before[0], store.written_bytes - before[1]]
        found = engine.host.plane_bytes, sum(store.drive_bytes), engine.arrangement.executor.spec.drives
        engine.close()
        return engine.choice, moved, [counts.drive_read_bytes, counts.drive_write_bytes], *found

    ranks = Turns(2, 2).run(run)
    part = replace(batch, num_micro_batches=1, num_runs=1, num_ranks=2, num_nodes=2)
    choice = ranks[0][0]
    spec = BlockSums.of(anatomy, choice).drive_spec(choice, part)
    assert spec is not None
    whole = sum(pools.state_image(size, adamw.FP32) for size in BlockSums.of(anatomy, choice).totals.sizes)
    assert sum(spec.state_bytes) < 0.6 * whole
    planned = host_pools(anatomy, choice, part, adamw.FP32)
    exact = {pool.name: pool.nbytes for pool in planned if pool.is_exact}
    assert {name: nbytes for name, nbytes in ranks[0][3].items() if nbytes} == exact
    on_drives = sum(pool.nbytes for pool in drive_pools(anatomy, choice, part, adamw.FP32))
    for _, moved, counted, _, kept, drives in ranks:
        assert moved == counted
        assert kept == on_drives
        assert (drives.state_bytes, drives.working_bytes) == (spec.state_bytes, spec.working_bytes)
        assert (drives.state, drives.working) == (spec.state, spec.working)
    assert ranks[0][1] == ranks[1][1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", [(2, 0), (9, 2)])
def test_a_checkpoint_is_that_of_one_rank_and_is_read_back(place: tuple[int, int], tmp_path: Path) -> None:
    def save(ranks: Any, name: str, there: Tiers | None, source: Path | None = None) -> None:
        device = "cpu" if ranks is None else RankLanes(ranks.turns, ranks.rank)
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=2, num_runs=2)
        settings: dict[str, Any] = {"precision": "bf16", "batch": batch, "ranks": ranks, "tiers": there}
        engine = attach_plainly(make_model(FAMILIES["llama_tied"]()), device=device, **settings)
        optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
        if source is None:
            batches = make_batches(2, seed=1)
            engine.forward_backward([batches[n] for n in engine.parts(2)[0 if ranks is None else ranks.rank]])
            optimizer.step()
        else:
            read_state(engine.host, source)  # the first rank of each node
            ranks.meet()
            engine.weights_changed()
        if ranks is None or ranks.rank == 0:
            write_state(engine, tmp_path / name)
        else:
            lend_state(engine)
        engine.close()

    for name in ("alone", "saved", "again"):
        (tmp_path / name).mkdir()
    save(None, "alone", None)
    Turns(2, 2).run(lambda ranks: save(ranks, "saved", tiers(tmp_path / "one", *place)))
    Turns(2, 2).run(lambda ranks: save(ranks, "again", tiers(tmp_path / "two", *place), tmp_path / "saved"))
    written = {path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*.safetensors")}
    assert len(written) > 3
    for path in written:
        expected = (tmp_path / "alone" / path).read_bytes()
        for name in ("saved", "again"):
            assert (tmp_path / name / path).read_bytes() == expected, (name, path)


@pytest.mark.parametrize("has_drives", [False, True])
def test_the_first_rank_writes_adapters_without_the_others(has_drives: bool, tmp_path: Path) -> None:
    tokenizer: Any = SimpleNamespace(save_pretrained=lambda path: None)

    def write(ranks: Any, there: Tiers | None) -> None:
        device = "cpu" if ranks is None else RankLanes(ranks.turns, ranks.rank)
        model = make_model(FAMILIES["llama_tied"]())
        TRAINED["adapters"](model)
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=2, num_runs=2)
        engine = attach_plainly(model, device=device, batch=batch, ranks=ranks, tiers=there)
        optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
        batches, own = make_batches(2, seed=1), engine.parts(2)[0 if ranks is None else ranks.rank]
        engine.forward_backward([batches[number] for number in own], seeds=[*own])
        optimizer.step()
        engine.settle()
        if ranks is None or ranks.rank == 0:
            place = tmp_path / ("alone" if ranks is None else "ranks")
            place.mkdir()
            with patch.object(ThreadRanks, "spread", side_effect=AssertionError("the others do not come")):
                write_adapter(engine, tokenizer, place, base="base")
        engine.close()

    write(None, None)
    Turns(2, 2).run(lambda ranks: write(ranks, tiers(tmp_path / "drives") if has_drives else None))
    files = [(tmp_path / name / WEIGHTS_NAME).read_bytes() for name in ("alone", "ranks")]
    assert files[0] == files[1]


@pytest.mark.parity
def test_a_killed_run_of_two_nodes_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    memory = {"activations": "recompute", "fragments": False}
    root = str(tmp_path)
    run_ranks(tmp_path / "alone", 1, train_run, root=root, out="alone", memory=memory, **SHORT)
    place: dict[str, Any] = {"root": root, "out": "run", "ram": 1_500_000, **SHORT}
    codes = exit_codes(tmp_path / "first", 2, train_on_drives, killed=[1, 200], num_nodes=2, **place)
    assert codes.pop(1) == -9
    assert set(codes) <= {RankError.exit_code, 6}
    assert run_ranks(tmp_path / "then", 2, train_on_drives, num_nodes=2, **place)[0] > 0
    assert_same_runs(tmp_path / "run", tmp_path / "alone")
    assert [path for drive in range(2) for path in (tmp_path / f"run-drive{drive}").glob("*/*")] == []
