"""Ranks in one process: the same bits over settings, and an order that is proved among all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.config.choice import StepBatch
from megatrain.errors import ConfigError, ModelError
from megatrain.layout import ownership
from megatrain.plan.program.operations import Kind, Lane
from megatrain.plan.program.step import step_program
from megatrain.stream.execute.executor import Executor
from megatrain.stream.lanes.base import OrderingError
from megatrain.stream.ranks import shared_gradients
from megatrain.stream.ranks.shared_gradients import SharedGradients
from tests.distributed.cases import AXES, cut_at, settings_of
from tests.distributed.threads import RankLanes, ThreadRanks, Turns
from tests.distributed.training import train
from tests.families import FAMILIES
from tests.products import pairwise_rows
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER


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
ON_NODES = [
    ("weights fetched before all ranks have updated them", 2),
    ("weights called new before this rank has updated its share", 2),
]


@pytest.mark.parametrize(
    ("skips", "gathers", "num_nodes"),
    [
        *((skips, False, 1) for skips in FAULTS.values()),
        *((FAULTS[fault], False, num_nodes) for fault, num_nodes in ON_NODES),
        *((skips, True, 1) for skips in GATHERS.values()),
    ],
    ids=[*FAULTS, *(f"{fault}-nodes" for fault, _ in ON_NODES), *GATHERS],
)
def test_a_missing_wait_among_ranks_is_found(skips: tuple[Lane, str], gathers: bool, num_nodes: int) -> None:
    alone = train(None, steps=2, reads=False)

    def faulty(ranks: ThreadRanks, *, checks: bool) -> Any:
        lanes = RankLanes(ranks.turns, ranks.rank, skips=skips, checks=checks)
        return train(ranks, steps=2, device=lanes, reads=False, gathers=gathers)

    with pytest.raises(OrderingError, match="without waiting"):
        Turns(2, num_nodes).run(lambda ranks: faulty(ranks, checks=True))
    found = Turns(2, num_nodes).run(lambda ranks: faulty(ranks, checks=False))
    assert found == [alone, alone]  # in turns nothing shows


def test_another_tree_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(None, steps=1)
    monkeypatch.setattr(shared_gradients, "_tree", lambda parts, _: parts[0] + parts[1] + parts[2] + parts[3])
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


def test_weights_that_another_node_does_not_get_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(None, steps=2)
    monkeypatch.setattr(ThreadRanks, "spread", lambda self, parts: None)
    found = Turns(2, 2).run(lambda ranks: train(ranks, steps=2))
    assert [one["losses"][0] for one in found] == [alone["losses"][0]] * 2
    assert [one["losses"][1] for one in found] != [alone["losses"][1]] * 2


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_bytes_that_a_rank_moves_are_the_program_s(num_nodes: int) -> None:
    """With the updates of two steps of two rounds, on the second of two ranks and two nodes."""

    def run(ranks: ThreadRanks) -> tuple[dict[str, int], dict[str, int]]:
        model = make_model(FAMILIES["llama"]())
        batch = StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=8, num_runs=4)
        lanes = RankLanes(ranks.turns, ranks.rank)
        engine = attach_plainly(model, device=lanes, batch=batch, ranks=ranks, precision="bf16", lockstep=2)
        optimizer = engine.adamw(**HYPER)
        runs = engine.arrangement.binding.runs
        program = step_program(engine.executor.spec, [[2], [2]], left=runs.left_after([2, 2]))
        for step in range(2):
            engine.forward_backward(make_batches(8, seed=step)[4 * ranks.rank :][:4])
            optimizer.step()
        engine.settle()
        counts = engine.counts
        moved = {"fetched": counts.fetch_bytes, "offloaded": counts.offload_bytes, **ranks.sent}
        kinds = {"fetched": (Kind.FETCH, Kind.LOAD), "offloaded": (Kind.OFFLOAD,)}
        kinds |= {"exchange": (Kind.EXCHANGE,), "spread": (Kind.SPREAD,)}
        return moved, {name: 2 * sum(map(program.nbytes, kinds[name])) for name in moved}

    for moved, planned in Turns(2, num_nodes).run(run):
        assert moved == planned
        assert ("spread" in moved) == (num_nodes > 1)
        assert all(moved.values())


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
