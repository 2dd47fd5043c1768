"""Ranks that watch the state have the bits of those that do not, and each watches what it updates."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.stream.engine import Engine
from megatrain.stream.execute import memory_watch
from megatrain.stream.execute.memory_watch import MemoryWatch
from megatrain.stream.optimizer import StreamedOptimizer
from tests.distributed.cases import AXES, cut_at, settings_of
from tests.distributed.threads import Turns
from tests.distributed.training import train
from tests.products import pairwise_rows


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[MemoryWatch]:
    """Watch all state of every engine from now on, in units of 512 elements; returns the watches."""
    found: list[MemoryWatch] = []
    make = Engine.make_optimizer

    def watched(engine: Engine, *args: Any, **settings: Any) -> StreamedOptimizer:
        optimizer = make(engine, *args, **settings)
        found.append(optimizer.watch_memory(1))
        return optimizer

    monkeypatch.setattr(memory_watch, "UNIT_NUMEL", 512)
    monkeypatch.setattr(Engine, "make_optimizer", watched)
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", pairwise_rows(AXES), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_settings_has_the_bits_of_one_rank_that_watches_nothing(
    row: dict[str, Any], watches: list[MemoryWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(row) | {"steps": 2}
    with cut_at(row["cut"]):
        with monkeypatch.context() as patch:
            patch.setattr(StreamedOptimizer, "watch_memory", lambda optimizer, rotation: None)
            alone = train(None, **settings)
        watches.clear()
        for told in Turns(*row["ranks"]).run(lambda ranks: train(ranks, **settings)):
            assert told == alone
    assert len(watches) == Turns(*row["ranks"]).size


def test_ranks_share_out_what_is_watched(watches: list[MemoryWatch]) -> None:
    """Together they watch what one rank does, and the frozen weights of a node once."""
    with cut_at(256):
        train(None, trained="frozen", steps=1)
        (alone,) = watches
        watches.clear()
        Turns(2).run(lambda ranks: train(ranks, trained="frozen", steps=1))
    first, second = watches

    def places(watch: MemoryWatch) -> set[tuple[int, int]]:
        held = [(block, each.place) for block, units in enumerate(watch._held) for each in units.values()]
        return {(block, index) for block, place in held for index in range(*place)}

    assert places(first) | places(second) == places(alone)
    assert not places(first) & places(second)
    assert first.trained_bytes + second.trained_bytes == alone.trained_bytes
    assert first.frozen_bytes + second.frozen_bytes == alone.frozen_bytes > 0
