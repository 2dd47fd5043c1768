"""Ranks in one process: the same bits over settings, and an order that is proved among all ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from operator import ne
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.choice import StepBatch
from megatrain.config.optimizers import adamw
from megatrain.errors import ConfigError, ModelError
from megatrain.layout import ownership, pools
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.memory.device_pools import device_peak_bytes
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import Operation
from megatrain.plan.program.step import step_program, sync_program
from megatrain.stream.execute.executor import Executor
from megatrain.stream.lanes.base import OrderingError
from megatrain.stream.ranks import shared_gradients
from megatrain.stream.ranks import sums as rank_sums
from megatrain.stream.ranks.shared_gradients import SharedGradients
from tests.distributed.cases import AXES, cut_at, settings_of
from tests.distributed.threads import RankLanes, ThreadRanks, Turns
from tests.distributed.training import train
from tests.families import FAMILIES
from tests.products import pairwise_rows
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", pairwise_rows(AXES), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_settings_has_the_bits_of_one_rank(row: dict[str, Any]) -> None:
    settings = settings_of(row) | {"steps": 2}
    with cut_at(row["cut"]):
        alone = train(None, **settings)
        for told in Turns(*row["ranks"]).run(lambda ranks: train(ranks, **settings)):
            assert told == alone


GATHERS = {
    "a piece sent before it was fetched": (Lane.GATHER, "slot"),
    "a slot fetched into while ranks gather": (Lane.FETCH, "slot"),
    "weights used before they are whole": (Lane.COMPUTE, "slot"),
    "a stale share fetched": (Lane.FETCH, "working"),
}
FAULTS = {
    "weights fetched before all ranks have updated them": (Lane.FETCH, "working"),
    "weights called new before this rank has updated its share": (Lane.SPREAD, "share"),
    "a sum sent before its backward has ended": (Lane.EXCHANGE, "gradient_buffer"),
    "a share kept before it has been exchanged": (Lane.OFFLOAD, "gradient_buffer"),
    "a buffer used again before its sum was kept": (Lane.COMPUTE, "gradient_buffer"),
}
RESIDENT = {
    "a share sent before it is updated: the others go on with the step before": (Lane.GATHER, "resident"),
    "resident weights read before all shares have come": (Lane.COMPUTE, "resident"),
    "a resident sum sent before its backward has ended": (Lane.EXCHANGE, "resident_gradient"),
    "a resident share squared before it is exchanged": (Lane.OFFLOAD, "resident_gradient"),
    "a host read before the shares of all are at home": (Lane.SPREAD, "share"),
}
ON_NODES = [
    ("weights fetched before all ranks have updated them", 2),
    ("weights called new before this rank has updated its share", 2),
]


MISSING_WAITS = {
    **{fault: (skips, {}, 1) for fault, skips in FAULTS.items()},
    **{f"{fault}-nodes": (FAULTS[fault], {}, num_nodes) for fault, num_nodes in ON_NODES},
    **{fault: (skips, {"gathers": True}, 1) for fault, skips in GATHERS.items()},
    **{fault: (skips, {"resident_layers": 4}, 1) for fault, skips in RESIDENT.items()},
}


@cache
def alone_unread() -> dict[str, Any]:
    """Train on one rank without reading between steps: what every fault among ranks is held against."""
    return train(None, steps=2, reads=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("skips", "settings", "num_nodes"), MISSING_WAITS.values(), ids=MISSING_WAITS)
def test_a_missing_wait_among_ranks_is_found(
    skips: tuple[Lane, str], settings: dict[str, Any], num_nodes: int
) -> None:
    alone = alone_unread()

    def faulty(ranks: ThreadRanks, *, checks: bool) -> Any:
        lanes = RankLanes(ranks.turns, ranks.rank, skips=skips, checks=checks)
        return train(ranks, steps=2, device=lanes, reads=False, **settings)

    with pytest.raises(OrderingError, match="without waiting"):
        Turns(2, num_nodes).run(lambda ranks: faulty(ranks, checks=True))
    found = Turns(2, num_nodes).run(lambda ranks: faulty(ranks, checks=False))
    assert found == [alone, alone]  # in turns nothing shows


def test_another_tree_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(None, steps=1)
    monkeypatch.setattr(rank_sums, "tree", lambda parts: parts[0] + parts[1] + parts[2] + parts[3])
    assert Turns(4).run(lambda ranks: train(ranks, steps=1))[0] != alone


def test_ranks_that_disagree_on_owners_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(None, steps=1)
    right = ownership.shares
    monkeypatch.setattr(shared_gradients, "shares", lambda *args: right(*args)[::-1])
    assert Turns(2).run(lambda ranks: train(ranks, steps=1)) == [alone, alone]  # whoever it is, if all agree
    begin = SharedGradients.__init__

    def begin_wrong(self: SharedGradients, ranks: ThreadRanks, *rest: Any) -> None:
        begin(self, ranks, *rest)
        if ranks.rank == 1:
            self._cuts = [cut[::-1] for cut in self._cuts]
            self.shares = [cut[1] for cut in self._cuts]

    monkeypatch.setattr(SharedGradients, "__init__", begin_wrong)
    with pytest.raises((RuntimeError, AssertionError)):
        assert Turns(2).run(lambda ranks: train(ranks, steps=1)) == [alone, alone]


@pytest.mark.parametrize(("how", "num_nodes", "resident_layers"), [("spread", 2, 0), ("gather_shares", 1, 4)])
def test_weights_that_another_rank_does_not_get_have_other_bits(
    how: str, num_nodes: int, resident_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the step before, on another node or in a resident place of another device."""
    alone = train(None, steps=2)
    monkeypatch.setattr(ThreadRanks, how, lambda self, parts: None)
    found = Turns(2, num_nodes).run(lambda ranks: train(ranks, steps=2, resident_layers=resident_layers))
    assert [one["losses"][0] for one in found] == [alone["losses"][0]] * 2
    assert [one["losses"][1] for one in found] != [alone["losses"][1]] * 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "num_nodes", "num_runs", "lockstep", "state"),
    [(2, 1, 4, 4, "fp32"), (2, 2, 16, 2, "int8"), (4, 2, 4, 2, "fp32"), (4, 2, 16, 1, "fp32")],
)
def test_bytes_that_a_rank_moves_are_the_program_s(
    size: int, num_nodes: int, num_runs: int, lockstep: int, state: str
) -> None:
    """With the updates of two steps of rounds that hold whole runs, or parts of one (the third)."""

    def run(ranks: ThreadRanks) -> tuple[dict[str, int], dict[str, int]]:
        model = make_model(FAMILIES["llama"]())
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=16, num_runs=num_runs)
        lanes = RankLanes(ranks.turns, ranks.rank)
        settings: dict[str, Any] = {"precision": "bf16", "lockstep": lockstep, "optimizer_state": state}
        engine = attach_plainly(model, device=lanes, batch=batch, ranks=ranks, **settings)
        optimizer = engine.adamw(**HYPER)
        sums = engine.arrangement.binding.job.sums(engine.choice).by_round
        program = step_program(engine.executor.spec, [[lockstep]] * len(sums), sums=sums)
        for step in range(2):
            batches = make_batches(16, seed=step)
            engine.forward_backward([batches[number] for number in engine.parts(16)[ranks.rank]])
            optimizer.step()
        engine.settle()
        counts = engine.counts
        moved = {"fetched": counts.fetch_bytes, "offloaded": counts.offload_bytes, **ranks.sent}
        moved["exchange"] = moved.pop("near", 0) + moved.pop("rail", 0)
        kinds = {"fetched": ("fetch", "load"), "offloaded": ("offload",)}
        kinds |= {"exchange": ("exchange",), "spread": ("spread",)}
        return moved, {name: 2 * sum(map(program.nbytes, kinds[name])) for name in moved}

    with cut_at(320):
        found = Turns(size, num_nodes).run(run)
    for moved, planned in found:
        assert moved == planned
        assert ("spread" in moved) == (num_nodes > 1)
        assert all(moved.values())


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_with_everything_resident_nothing_crosses_a_link_to_the_host(num_nodes: int) -> None:
    """After the state has come once: sums and weights go from device to device, as the program says."""

    def run(ranks: ThreadRanks) -> None:
        model = make_model(FAMILIES["llama"]())
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=8, num_runs=4)
        lanes = RankLanes(ranks.turns, ranks.rank)
        settings: dict[str, Any] = {"precision": "bf16", "gradients": "device", "resident_layers": 4}
        engine = attach_plainly(model, device=lanes, batch=batch, ranks=ranks, lockstep=2, **settings)
        optimizer = engine.adamw(**HYPER)
        sizes = [layout.sizes for layout in engine.host.layouts]
        state = sum(pools.resident_state(size, adamw.FP32, 4) for size in sizes)
        assert 0 < state < 10 * sum(size.num_state for size in sizes) / 2  # of four shares, the largest
        others = sum(map(pools.resident_weights, sizes)) + sum(map(pools.resident_gradient, sizes))
        assert lanes.device_bytes == state + others
        sums = engine.arrangement.binding.job.sums(engine.choice).by_round
        program = step_program(engine.executor.spec, [[2]], sums=sums)
        kinds, issue = Counter[str](), engine.executor.issue

        def counted(operation: Operation) -> None:
            kinds[operation.label] += 1
            issue(operation)

        engine.executor.issue = counted  # type: ignore[method-assign]
        for step in range(3):
            engine.forward_backward(make_batches(8, seed=step)[2 * ranks.rank :][:2])
            optimizer.step()
        crossing = ("fetch", "load", "offload", "pull", "push", "save", "restore")
        assert {kind: kinds[kind] for kind in crossing if kind in kinds} == {"pull": len(sizes)}
        assert engine.counts.fetch_bytes == engine.counts.offload_bytes == 0
        assert ranks.sent["near"] + ranks.sent["rail"] == 3 * program.nbytes("exchange") > 0
        assert ranks.sent["gather"] == 3 * program.nbytes("spread") > 0
        assert {name for name, nbytes in ranks.sent.items() if nbytes} <= {"near", "rail", "gather"}
        pushed = sum(op.nbytes for op in sync_program(engine.executor.spec, range(len(sizes))))
        assert engine.arrangement.shared is not None
        assert pushed == 12 * sum(share.numel for share in engine.arrangement.shared.shares)

    with cut_at(320):
        Turns(4, num_nodes).run(run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("resident_layers", [2, 4])
def test_device_memory_of_shares_is_as_planned(resident_layers: int) -> None:
    """Of the state of resident blocks, and of gradients that wait there, all ranks have as much room."""
    whole = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=4, num_runs=4)
    settings: dict[str, Any] = {
        "precision": "bf16",
        "gradients": "device",
        "resident_layers": resident_layers,
    }

    def run(ranks: ThreadRanks) -> None:
        lanes = RankLanes(ranks.turns, ranks.rank)
        model = make_model(FAMILIES["llama"]())
        engine = attach_plainly(model, device=lanes, batch=whole, ranks=ranks, lockstep=2, **settings)
        optimizer = engine.adamw(**HYPER)
        engine.forward_backward(make_batches(4)[2 * ranks.rank :][:2])
        optimizer.step()
        engine.settle()
        part = replace(whole, num_micro_batches=2, num_runs=2, num_ranks=2)
        planned = [pool for pool in device_peak_bytes(anatomy, engine.choice, part) if pool.is_exact]
        assert lanes.device_bytes == sum(pool.nbytes for pool in planned)
        assert {"resident optimizer state", "waiting gradients"} - {pool.name for pool in planned} == (
            {"waiting gradients"} if resident_layers == 4 else set()
        )

    anatomy = count_anatomy(
        FAMILIES["llama"](), micro_batch_size=2, seq_len=16, precision="bf16", device_type="cpu"
    )
    with cut_at(320):
        Turns(2).run(run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shape", "updates"), [((2, 1), "immediate"), ((4, 2), "deferred")], ids=str)
def test_moments_and_scales_that_ranks_keep_are_those_of_one(shape: tuple[int, int], updates: str) -> None:
    """Shares are cut in the middle of scales, whose elements are then updated by one rank, on one node."""

    def run(ranks: Any) -> list[dict[str, Tensor]]:
        settings: dict[str, Any] = {"precision": "bf16", "optimizer_state": "int8", "updates": updates}
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        own = slice(rank * 4 // size, (rank + 1) * 4 // size)
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=4, num_runs=4)
        lanes = "cpu" if ranks is None else RankLanes(ranks.turns, rank)
        model = make_model(FAMILIES["llama"]())
        engine = attach_plainly(model, device=lanes, batch=batch, ranks=ranks, **settings)
        optimizer = engine.adamw(**HYPER, max_grad_norm=None if updates == "immediate" else 0.5)
        shared = engine.executor.gradients.shared
        if isinstance(shared, SharedGradients):
            assert any(map(ne, shared.updated, [cut[rank] for cut in shared._cuts]))
        for step in range(2):
            engine.forward_backward(make_batches(4, seed=step)[own])
            optimizer.step()
        engine.settle()
        found = []
        for number in range(len(engine.host.blocks)):
            with engine.host.borrow(number) as block:
                found.append({name: value.clone() for name, value in block.optimizer_tensors().items()})
        return found

    with cut_at(320):
        alone = run(None)
        for told in Turns(*shape).run(run):
            for block, one in zip(told, alone, strict=True):
                assert [name for name in one if not torch.equal(block[name], one[name])] == []
    assert any(value.any() for name, value in alone[0].items() if "exp_avg_sq_scale/" in name)


def test_nodes_with_other_weights_are_refused() -> None:
    def begin(ranks: ThreadRanks) -> None:
        model = make_model(FAMILIES["llama"]())
        if ranks.node == 1:
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight[3, 5] += 0.5
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=4, num_runs=4)
        attach_plainly(model, device=RankLanes(ranks.turns, ranks.rank), batch=batch, ranks=ranks)

    with pytest.raises(ConfigError, match=r"node 1 has other weights .* block of model.layers.1\."):
        Turns(4, 2).run(begin)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"num_gradient_buffers": 3}, "num_gradient_buffers=3 in place of num_gradient_buffers=1;"),
        ({"activations": "offload"}, ": visit 2: Visit(block="),
    ],
    ids=str,
)
def test_a_rank_that_would_take_another_step_is_refused(other: dict[str, Any], said: str) -> None:
    def one(ranks: ThreadRanks) -> None:
        with pytest.raises(ConfigError) as caught:
            train(ranks, steps=1, **(other if ranks.rank == 1 else {}))
        assert "rank 1 would take another step than rank 0: " in str(caught.value)
        assert said in str(caught.value)

    Turns(2).run(one)


def test_a_visit_that_nobody_has_foreseen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    foreseen = Executor._matches

    def matches(self: Executor, operation: Any, visit: Any, is_backward: bool) -> bool:
        return not is_backward and foreseen(self, operation, visit, is_backward)

    monkeypatch.setattr(Executor, "_matches", matches)
    with pytest.raises(ModelError, match=r"an order that was not foreseen, .* use one rank"):
        Turns(2).run(lambda ranks: train(ranks, num_runs=2, num_micro_batches=2, steps=1))
