"""Runs of several ranks: they stop, are killed, and go on with another number of ranks, to the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.log import log_to_stderr
from megatrain.errors import RankError
from megatrain.train.records.json_lines import read_rows
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
        (((2, 2), (1, 1)), [1, 85]),
        (((2, 1), (2, 2)), [0, 95]),
        (((2, 1), (1, 1)), [1, 140]),
        pytest.param(((4, 1), (2, 1)), [3, 85], marks=pytest.mark.parity),
        pytest.param(((4, 1), (1, 1)), [1, 120], marks=pytest.mark.parity),
        pytest.param(((4, 1), (4, 1)), [2, 130], marks=pytest.mark.parity),
        pytest.param(((2, 1), (4, 1)), [0, 110], marks=pytest.mark.parity),
        pytest.param(((4, 2), (2, 1)), [2, 95], marks=pytest.mark.parity),
        pytest.param(((2, 1), (4, 4)), [1, 120], marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_a_killed_rank_ends_all_and_other_ranks_go_on_to_the_same_bits(
    tmp_path: Path, alone: Path, sizes: tuple[tuple[int, int], tuple[int, int]], killed: list[int]
) -> None:
    """Sizes are of ranks and of nodes: those of the run that is killed, and those that go on."""
    run = kill_and_go_on(tmp_path, alone.parent, sizes, killed)
    assert any((run / "checkpoints").iterdir())
    assert_same_runs(run, alone)
    assert losses_of(run) == losses_of(alone)


@pytest.mark.parity
@pytest.mark.parametrize("number", range(30))
def test_a_rank_killed_at_random_changes_no_bit(tmp_path: Path, alone: Path, number: int) -> None:
    """From the first words of the ranks on: 175 collectives of each are the whole run."""
    draw = random.Random(number)
    size = draw.choice((2, 4))
    then = draw.choice((1, 2, 4)), 1
    run = kill_and_go_on(
        tmp_path, alone.parent, ((size, 1), then), [draw.randrange(size), draw.randrange(1, 175)]
    )
    assert_same_runs(run, alone)
    assert losses_of(run) == losses_of(alone)


def kill_and_go_on(
    place: Path, root: Path, sizes: tuple[tuple[int, int], tuple[int, int]], killed: list[int]
) -> Path:
    """Kill a rank of a run, which ends all, and go on with other ranks; return the run's directory."""
    (size, num_nodes), (then, nodes_then) = sizes
    run: dict[str, Any] = {"root": str(root), "out": place.name}
    codes = exit_codes(place / "first", size, train_run, killed=killed, num_nodes=num_nodes, **run)
    assert codes.pop(killed[0]) == -9
    assert set(codes) <= {RankError.exit_code, 6}  # 6: some of its blocks are updated, others are not
    run_ranks(place / "then", then, train_run, num_nodes=nodes_then, **run)
    return root / place.name


def test_ranks_that_would_train_other_things_are_refused(tmp_path: Path) -> None:
    codes = exit_codes(tmp_path / "logs", 2, _train_another, root=str(tmp_path))
    assert codes == [2, 2]
    said = (tmp_path / "logs/errors").read_text()
    assert "rank 1 would train something else than rank 0: its optim.lr is 0.02, and not 0.01" in said


def _train_another(ranks: object, *, root: str) -> str:
    lr = 0.01 if ranks.rank == 0 else 0.02  # type: ignore[attr-defined]
    return train_run(ranks, root=root, out="run", optim={"lr": lr})


def test_a_run_says_how_many_ranks_it_has_and_records_their_waits(tmp_path: Path) -> None:
    codes = exit_codes(tmp_path / "logs", 2, _train_short, root=str(tmp_path))
    assert codes == [0, 0]
    said = (tmp_path / "logs/errors").read_text()
    assert said.count("ranks: 2, with ") == 1
    assert "each and one state in a node's memory; parallel.shards is 4: give it too, if" in said
    first, *_, last = read_rows(tmp_path / "run/events.jsonl")
    assert (first["ranks"], first["nodes"], first["shards"]) == (2, 1, 4)
    assert len(last["waited_s"]) == 2
    assert min(last["waited_s"]) > 0


def _train_short(ranks: object, *, root: str) -> str:
    if ranks.rank == 0:  # type: ignore[attr-defined]
        log_to_stderr()
    return train_run(ranks, root=root, out="run", train={"steps": 1}, optim={"warmup_steps": 0})
