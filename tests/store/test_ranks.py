"""Stores of two ranks in the same files: each moves its own chunks, and the first one commits for both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain.errors import CheckpointError, OutputError
from megatrain.store.drives import system as calls
from megatrain.store.drives.drive import staging
from megatrain.store.drives.striped import StripedStore
from tests.store.disks import CHUNK, EXTENTS, Counted, content, holds, make_store


def open_two(root: Path) -> list[StripedStore]:
    """Begin a store anew, in two drives, as two ranks that map one table."""
    tables: list[Tensor] = []

    def memory(nbytes: int) -> Tensor:
        tables.append(tables[0] if tables else torch.zeros(nbytes, dtype=torch.uint8))
        return tables[-1]

    drives = [root / f"drive{number}" for number in range(2)]
    stores = [
        StripedStore(drives, EXTENTS, chunk_bytes=CHUNK, part=(rank, 2), memory=memory) for rank in range(2)
    ]
    stores[0].create()
    stores[1].join()
    return stores


def close(stores: Sequence[StripedStore]) -> None:
    for store in stores:
        store.close()


def test_each_rank_moves_its_chunks_and_together_all(tmp_path: Path) -> None:
    stores = open_two(tmp_path)
    for store in stores:
        for extent in range(len(EXTENTS)):
            buffer = content(extent, 1)
            for span in stores[1 - store._rank].spans(extent, is_own=True):
                buffer[span.start : span.stop] = 0xAA  # the other rank's: it is not written
            store.write(extent, buffer, is_own=True)
    assert [store.written_bytes for store in stores] == [12288 + 4096 + 16384, 8192 + 8192]
    for store in stores:
        assert holds(store, 1)  # each reads what both have written
    own = [staging(extent.num_bytes) for extent in EXTENTS]
    for store in stores:
        for extent, buffer in enumerate(own):
            for future in store.submit_read(extent, buffer, is_own=True):
                future.result()
    assert all(torch.equal(buffer, content(extent, 1)) for extent, buffer in enumerate(own))
    stores[0].commit(1, {})
    close(stores)
    alone = make_store(tmp_path, 2)
    assert alone.resume().step == 1
    assert holds(alone, 1)
    alone.close()


def test_no_other_run_gets_the_drives_before_the_last_rank_lets_go(tmp_path: Path) -> None:
    stores = open_two(tmp_path)
    stores[0].close()
    with pytest.raises(OutputError, match="in use by another run"):
        make_store(tmp_path, 2).create()
    stores[1].close()
    make_store(tmp_path, 2).create()


class Death(BaseException):
    pass


class Dying(Counted):
    """One of the ranks dies at a call, half-way through a write; the other one goes on."""

    def __init__(self, victim: int, at: int) -> None:
        super().__init__()
        self.victim, self.at, self.now = victim, at, -1

    def before(self, call: str, num_bytes: int = 0) -> int:
        if self.now != self.victim:
            self.num_calls -= 1
        elif self.num_calls >= self.at:
            raise Death
        return num_bytes

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.now == self.victim and self.num_calls == self.at:
            os.pwritev(descriptor, [buffers[0][: len(buffers[0]) // 8192 * 4096]], offset)
        return super().pwritev(descriptor, buffers, offset)


def take_steps(stores: Sequence[StripedStore], dying: Dying, *, meets: bool = True) -> int:
    """Write three steps as the lanes of two ranks do, until one dies; return the steps that were committed.

    Args:
        stores: Of the ranks.
        dying: Kills one.
        meets: A commit waits for what every rank has written; not so: for the first one's alone.
    """
    for step in range(1, 4):
        is_dead = False
        for rank in (0, 1) if step % 2 else (1, 0):  # one that lives comes as far as the next meeting
            dying.now = rank
            try:
                for extent in range(len(EXTENTS)):
                    stores[rank].write(extent, content(extent, step), is_own=True)
            except Death:
                is_dead = True
        if is_dead and meets:
            return step - 1
        dying.now = 0
        try:
            stores[0].commit(step, {})
        except Death:
            return step - 1
        if is_dead:
            return step
    return 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_at_any_call_leaves_the_old_commit_or_the_new_one(
    tmp_path: Path, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for at in range(40):
        monkeypatch.setattr(calls, "system", Counted())
        stores = open_two(tmp_path)
        dying = Dying(victim, at)
        monkeypatch.setattr(calls, "system", dying)
        step = take_steps(stores, dying)
        monkeypatch.setattr(calls, "system", Counted())
        close(stores)
        if step == 3:
            break
        if step == 0 and not (tmp_path / "drive0/commit.json").exists():
            continue
        alone = make_store(tmp_path, 2)
        left = alone.resume().step
        assert left in (step, step + 1)  # the record may be there, though its rank died before it said so
        assert holds(alone, left), f"rank {victim} died at call {at}"
        found.add(left)
        alone.close()
    assert step == 3, "not every call was tried"
    assert found >= {1, 2}


def test_a_commit_that_does_not_wait_for_the_other_rank_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = open_two(tmp_path)
    dying = Dying(1, 2)
    monkeypatch.setattr(calls, "system", dying)
    assert take_steps(stores, dying, meets=False) == 2
    close(stores)
    alone = make_store(tmp_path, 2)
    assert alone.resume().step == 2
    with pytest.raises(CheckpointError, match="damaged"):
        holds(alone, 2)
    alone.close()
