"""Runs of several ranks: they stop, are killed, and go on with another number of ranks, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import RankError
from tests.distributed.processes import exit_codes, run_ranks
from tests.distributed.runs import train_run
from tests.train.evaluate.test_evaluation import losses_of
from tests.train.test_loop import assert_same_runs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on one rank, without an interruption."""
    root = tmp_path_factory.mktemp("alone")
    run_ranks(root / "logs", 1, train_run, root=str(root), out="run")
    return root / "run"


@pytest.mark.parametrize(
    ("sizes", "killed"),
    [
        (((2, 2), (1, 1)), [1, 17]),
        (((2, 1), (2, 2)), [0, 17]),
        pytest.param(((2, 1), (1, 1)), [1, 17], marks=pytest.mark.parity),
        pytest.param(((4, 1), (2, 1)), [3, 9], marks=pytest.mark.parity),
        pytest.param(((2, 1), (4, 1)), [0, 22], marks=pytest.mark.parity),
        pytest.param(((4, 2), (2, 1)), [2, 17], marks=pytest.mark.parity),
        pytest.param(((2, 1), (4, 4)), [1, 22], marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_a_killed_rank_ends_all_and_other_ranks_go_on_to_the_same_bits(
    tmp_path: Path, alone: Path, sizes: tuple[tuple[int, int], tuple[int, int]], killed: list[int]
) -> None:
    """Sizes are of ranks and of nodes: those of the run that is killed, and those that go on."""
    (size, num_nodes), (then, nodes_then) = sizes
    place: dict[str, Any] = {"root": str(alone.parent), "out": f"run-{size}-{num_nodes}-{then}-{nodes_then}"}
    codes = exit_codes(tmp_path / "first", size, train_run, killed=killed, num_nodes=num_nodes, **place)
    assert codes.pop(killed[0]) == -9
    assert set(codes) <= {RankError.exit_code, 6}  # 6: some of its blocks are updated, others are not
    assert any((alone.parent / place["out"] / "checkpoints").iterdir())
    run_ranks(tmp_path / "then", then, train_run, num_nodes=nodes_then, **place)
    assert_same_runs(alone.parent / place["out"], alone)
    assert losses_of(alone.parent / place["out"]) == losses_of(alone)


def test_ranks_that_would_train_other_things_are_refused(tmp_path: Path) -> None:
    codes = exit_codes(tmp_path / "logs", 2, _train_another, root=str(tmp_path))
    assert codes == [2, 2]
    said = (tmp_path / "logs/errors").read_text()
    assert "rank 1 would train something else than rank 0: its optim.lr is 0.02, and not 0.01" in said


def _train_another(ranks: object, *, root: str) -> str:
    lr = 0.01 if ranks.rank == 0 else 0.02  # type: ignore[attr-defined]
    return train_run(ranks, root=root, out="run", optim={"lr": lr})
