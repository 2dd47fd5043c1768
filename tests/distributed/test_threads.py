"""Ranks in one process: the same bits over settings, and an order that is proved among all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.layout import ownership
from megatrain.plan.program.operations import Lane
from megatrain.stream.execute import shared_gradients
from megatrain.stream.execute.shared_gradients import SharedGradients
from megatrain.stream.lanes.base import OrderingError
from tests.distributed.threads import RankLanes, ThreadRanks, Turns
from tests.distributed.training import train
from tests.products import pairwise_rows

AXES: dict[str, tuple[Any, ...]] = {
    "family": ("llama_tied", "mixtral", "gpt2", "jamba", "gemma2"),
    "size": (2, 4),
    "rounds": ((4, 1), (4, 4), (8, 2), (12, 1)),
    "activations": ("keep", "recompute", "offload"),
    "fragments": (False, True),
    "outer_streams": (False, True),
    "updates": ("deferred", "immediate", "serial"),
    "precision": ("fp32", "bf16"),
    "dropout": (False, True),
    "padded": (False, True),
}
"""Rounds are micro-batches of a step, and how many of them are in lockstep, at most."""


def settings_of(row: dict[str, Any]) -> dict[str, Any]:
    row = dict(row)
    count, lockstep = row.pop("rounds")
    del row["size"]
    if row["updates"] == "immediate":
        row["max_grad_norm"] = None
    if row["family"] in ("llama_tied", "gpt2", "gemma2"):
        row["outer_streams"] = False  # they are tied
    return row | {"num_micro_batches": count, "lockstep": lockstep, "steps": 2}


@pytest.mark.parametrize("row", pairwise_rows(AXES), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_settings_has_the_bits_of_one_rank(row: dict[str, Any]) -> None:
    settings = settings_of(row)
    alone = train(None, **settings)
    for told in Turns(row["size"]).run(lambda ranks: train(ranks, **settings)):
        assert told == alone


FAULTS = {
    "weights fetched before all ranks have updated them": (Lane.FETCH, "working"),
    "weights called new before this rank has updated its share": (Lane.SPREAD, "share"),
    "a sum sent before its backward has ended": (Lane.EXCHANGE, "gradient_buffer"),
    "a share kept before it has been exchanged": (Lane.OFFLOAD, "gradient_buffer"),
    "a buffer used again before its sum was kept": (Lane.COMPUTE, "gradient_buffer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_among_ranks_is_found(fault: str) -> None:
    alone = train(None, steps=2, reads=False)

    def faulty(ranks: ThreadRanks, *, checks: bool) -> Any:
        lanes = RankLanes(ranks.turns, ranks.rank, skips=FAULTS[fault], checks=checks)
        return train(ranks, steps=2, device=lanes, reads=False)

    with pytest.raises(OrderingError, match="without waiting"):
        Turns(2).run(lambda ranks: faulty(ranks, checks=True))
    assert Turns(2).run(lambda ranks: faulty(ranks, checks=False)) == [alone, alone]  # in turns nothing shows


def test_another_tree_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(None, steps=1)
    monkeypatch.setattr(shared_gradients, "_tree", lambda parts: parts[0] + parts[1] + parts[2] + parts[3])
    assert Turns(4).run(lambda ranks: train(ranks, steps=1))[0] != alone


def test_ranks_that_disagree_on_owners_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(None, steps=1)
    right = ownership.shares
    monkeypatch.setattr(shared_gradients, "shares", lambda *args: right(*args)[::-1])
    assert Turns(2).run(lambda ranks: train(ranks, steps=1)) == [alone, alone]  # whoever it is, if all agree
    begin = SharedGradients.__init__

    def begin_wrong(self: SharedGradients, ranks: ThreadRanks, layouts: Any) -> None:
        begin(self, ranks, layouts)
        if ranks.rank == 1:
            self._cuts = [cut[::-1] for cut in self._cuts]
            self.shares = [cut[1] for cut in self._cuts]

    monkeypatch.setattr(SharedGradients, "__init__", begin_wrong)
    with pytest.raises((RuntimeError, AssertionError)):
        assert Turns(2).run(lambda ranks: train(ranks, steps=1)) == [alone, alone]
