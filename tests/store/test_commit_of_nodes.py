"""Commits of two nodes, each with a store of its own: a crash at any call leaves one step that both hold."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatrain.errors import CheckpointError, MegatrainError
from megatrain.store.drives import system as calls
from megatrain.store.drives.record import PREPARED_NAME, RECORD_NAME, newest_of_all, nothing_in_common
from megatrain.store.drives.striped import StripedStore
from tests.store.disks import Counted, Failing, holds, make_store, write_step


def commit_both(nodes: list[StripedStore], step: int) -> Iterator[None]:
    """Write a step on both, and commit it; the second one is ahead, and writes on at once."""
    first, second = nodes

    def ahead() -> None:
        second.commit(step, {"step": step}, lambda: None)
        write_step(second, step + 1, commits=False)

    for node in nodes:
        write_step(node, step, commits=False)
    yield
    first.commit(step, {"step": step}, ahead)


def steps_of(node: StripedStore) -> list[int]:
    return [record.step for record in node.check()]


def begin(root: Path) -> list[StripedStore]:
    for number in range(2):
        (root / f"node-{number}").mkdir()
    nodes = [make_store(root / f"node-{number}", 2) for number in range(2)]
    for node in nodes:
        node.create()
    list(commit_both(nodes, 1))
    return nodes


def test_a_crash_at_any_call_of_a_commit_leaves_both_nodes_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "system", Counted())
    found = []
    for number in range(100):
        root = tmp_path / str(number)
        root.mkdir()
        nodes = begin(root)
        committing = commit_both(nodes, 2)
        next(committing)
        failing = Failing(at=number)
        monkeypatch.setattr(calls, "system", failing)
        with suppress(MegatrainError):
            list(committing)
        monkeypatch.setattr(calls, "system", Counted())
        for node in nodes:
            node.close()
        nodes = [make_store(root / f"node-{n}", 2) for n in range(2)]
        held = [steps_of(node) for node in nodes]
        step = newest_of_all(held)
        assert step is not None, f"call {number} leaves {held}"
        for at in range(4):  # and it may end again, while it goes on from there
            monkeypatch.setattr(calls, "system", Failing(at=at, number=errno.EIO))
            with suppress(MegatrainError):
                nodes[at % 2].resume(step)
            monkeypatch.setattr(calls, "system", Counted())
            nodes[at % 2].close()
            assert newest_of_all([steps_of(node) for node in nodes]) == step
        for node in nodes:
            assert node.resume(step).meta == {"step": step}
            assert holds(node, step)
            assert steps_of(node) == [step]
        list(commit_both(nodes, step + 1))
        for node in nodes:
            assert steps_of(node) == [step + 1]
            node.close()
        found.append((held, step))
        if failing.num_calls <= number:
            break
    assert [step for _, step in found] == sorted(step for _, step in found)
    kinds = {tuple(map(tuple, held)): step for held, step in found}
    assert kinds == {
        ((1,), (1,)): 1,
        ((1, 2), (1,)): 1,
        ((1, 2), (1, 2)): 2,
        ((1, 2), (2,)): 2,
        ((2,), (2,)): 2,
    }


def test_nodes_without_a_step_in_common_are_named(tmp_path: Path) -> None:
    nodes = begin(tmp_path)
    for node in nodes:
        node.close()
    (tmp_path / f"node-1/drive0/{RECORD_NAME}").unlink()
    held = [steps_of(node) for node in nodes]
    assert newest_of_all(held) is None
    said = nothing_in_common(held, tmp_path)
    assert "(node 0 holds step 1, node 1 holds none)" in said
    assert f"remove {RECORD_NAME} and {PREPARED_NAME}" in said
    with pytest.raises(CheckpointError, match="no step was committed there"):
        nodes[1].resume(1)
