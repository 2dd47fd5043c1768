"""A step for which the device of one rank has no room: all give it up, and go on in other rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import GivenUpError, exhausted_memory
from megatrain.stream.engine import Engine
from megatrain.stream.ranks.given_up import StepMeeting
from tests.distributed.cases import AXES, cut_at, settings_of
from tests.distributed.threads import ThreadRanks, Turns
from tests.distributed.training import pass_all, train
from tests.products import pairwise_rows
from tests.reference import Batch

FULL = "CUDA out of memory. Tried to allocate 2 GiB."
GIVEN_UP = {
    **AXES,
    "updates": ("deferred", "serial"),
    "rounds": ((8, 8), (8, 4), (16, 4), (8, 2)),
    "fails": ("first", "last", "all"),
    "place": (0.0, 0.3, 0.6, 1.0),
    "is_told": (True, False),
}
"""Which ranks have no room, after which part of the visits of a step, and whether the others learn of it
before they come to the end of their passes."""


class Full:
    """Lets the device of a rank have no room in the second step, which it then takes in smaller rounds."""

    def __init__(self, fails: bool, place: float) -> None:
        self._fails, self._place = fails, place
        self._num_visits: list[int] = []
        self.errors: list[GivenUpError] = []
        self.num_failed = 0

    def __call__(self, engine: Engine, ranks: Any, batches: list[Batch], seeds: list[int]) -> Tensor:
        executor, close, count = engine.executor, engine.executor.close, 0
        if len(self._num_visits) > 1:
            return pass_all(engine, ranks, batches, seeds)

        def closed(*args: Any, **given: Any) -> None:
            nonlocal count
            if self._fails and self._num_visits and count == round(self._place * (self._num_visits[0] - 1)):
                self.num_failed += 1
                raise torch.OutOfMemoryError(FULL)
            count += 1
            close(*args, **given)

        executor.__dict__["close"] = closed
        try:
            return pass_all(engine, ranks, batches, seeds)
        except GivenUpError as error:
            self.errors.append(error)
        finally:
            self._num_visits.append(count)
            del executor.__dict__["close"]
        together = min(engine.choice.lockstep, len(engine.parts(len(batches))[ranks.rank]))
        engine.reconfigure(replace(engine.choice, lockstep=max(1, together // 2)))
        return pass_all(engine, ranks, batches, seeds)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("row", pairwise_rows(GIVEN_UP), ids=lambda row: "-".join(map(str, row.values())))
def test_a_step_that_is_given_up_runs_again_in_smaller_rounds_to_the_same_bits(row: dict[str, Any]) -> None:
    row = dict(row)
    which, place, is_told = row.pop("fails"), row.pop("place"), row.pop("is_told")
    size, num_nodes = row["ranks"]
    failing = {"first": {0}, "last": {size - 1}, "all": {*range(size)}}[which]
    settings = settings_of(row) | {"steps": 3}
    full = [Full(rank in failing, place) for rank in range(size)]

    def one(ranks: ThreadRanks) -> Any:
        if not is_told:
            ranks.__dict__["give_up"] = lambda: None
        return train(ranks, passes=full[ranks.rank], **settings)

    with cut_at(row["cut"]):
        alone = train(None, **settings)
        found = Turns(*row["ranks"]).run(one)
    assert found == [alone] * size
    failed = [rank for rank, each in enumerate(full) if each.num_failed]
    if is_told and which == "all":  # the first to fail tells the others, which need not fail themselves
        assert failed
    else:
        assert failed == sorted(failing)
    for rank, each in enumerate(full):
        (error,) = each.errors
        assert (error.rank, error.reason) == (failed[0], FULL)
        node, place = divmod(rank, size // num_nodes)
        is_here = node == failed[0] // (size // num_nodes)
        assert error.is_told == (rank != failed[0] if is_here else place > 0)
        assert exhausted_memory(error) is None
        cause = error.__cause__
        assert (cause is not None and exhausted_memory(cause) == "device") == (rank in failed)
        assert each.num_failed == (rank in failed)


class Nobody:
    """A rank of which nothing may be asked, and what goes through its steps."""

    size = 2

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def test_ranks_that_swap_tokens_inside_attention_do_not_give_up_a_step_together() -> None:
    nobody: Any = Nobody()
    meeting = StepMeeting(nobody, sequence=2)
    meeting.begin()
    meeting.come()
    assert meeting.come_early(torch.OutOfMemoryError(FULL), nobody) is None


def test_a_step_that_not_all_ranks_have_begun_is_not_given_up_together() -> None:
    """They would be in another meeting, such as that in which they compare the step."""
    nobody: Any = Nobody()
    assert StepMeeting(nobody, sequence=1).come_early(torch.OutOfMemoryError(FULL), nobody) is None
