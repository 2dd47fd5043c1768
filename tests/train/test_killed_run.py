"""kill -9 at random points: the run goes on to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatrain.layout.blocks import split_part_name
from tests.forks import run_module
from tests.train.test_loop import assert_same_runs, rows_of, state_of

LIMIT_S = 3500
"""Of a run of `make parity` or `make soak`, a little less than what its test is given."""


@pytest.mark.parametrize(
    ("where", "num_kills", "steps"),
    [
        ("device", 2, 10),
        ("long", 2, 6),
        pytest.param("very long", 2, 3, marks=[pytest.mark.parity, pytest.mark.timeout(3600)]),
        pytest.param("ram", 3, 15, marks=pytest.mark.parity),
        pytest.param("ram", 30, 150, marks=pytest.mark.parity),
        pytest.param("device", 30, 150, marks=pytest.mark.parity),
    ],
)
def test_killed_run_equals_uninterrupted_run(tmp_path: Path, where: str, num_kills: int, steps: int) -> None:
    done = run_module(
        "tests.train.killed_run", tmp_path, str(num_kills), "1", str(steps), where, limit_s=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{num_kills} kills in {steps} steps" in done.stdout
    assert where != "very long" or "0 of them too late" in done.stdout
    assert_same_runs(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(
    ("where", "num_kills", "steps"),
    [
        ("experts on drives", 2, 8),
        pytest.param("experts", 2, 12, marks=pytest.mark.parity),
        pytest.param("experts", 20, 100, marks=pytest.mark.parity),
        pytest.param("experts on drives", 20, 100, marks=pytest.mark.parity),
    ],
)
def test_killed_run_goes_on_with_other_chunks_of_experts(
    tmp_path: Path, where: str, num_kills: int, steps: int
) -> None:
    """In RAM there are half as many as in the run that is whole: files are others, and no bit is."""
    done = run_module(
        "tests.train.killed_run", tmp_path, str(num_kills), "0", str(steps), where, limit_s=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("step", "loss", "grad_norm"):
        killed, whole = (rows_of(tmp_path / run) for run in ("killed", "whole"))
        assert [row[name] for row in killed] == [row[name] for row in whole], name
    left, right = (joined_parts(state_of(tmp_path / run)) for run in ("killed", "whole"))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def joined_parts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the parts of each tensor, and leave out in which file it is."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for key, tensor in state.items():
        name, rows = split_part_name(key.split(": ")[1])
        parts.setdefault(f"{key.split()[0]} {name}", []).append((0 if rows is None else rows.start, tensor))
    return {
        name: torch.cat([part for _, part in sorted(found, key=lambda each: each[0])])
        for name, found in parts.items()
    }


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("adapters", 2),
        pytest.param("adapters", 200, marks=[pytest.mark.parity, pytest.mark.timeout(3600)]),
        pytest.param("model", 200, marks=[pytest.mark.parity, pytest.mark.timeout(3600)]),
    ],
)
def test_run_killed_at_a_call_decides_and_ends_as_if_nothing_had_been(
    tmp_path: Path, kind: str, number: int
) -> None:
    done = run_module("tests.train.killed_calls", tmp_path, str(number), "1", kind, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{number} of" in done.stdout


@pytest.mark.parametrize(
    ("where", "how", "number", "steps", "start"),
    [
        ("drives", "kill", 2, 8, "fork"),
        ("ranks", "signals", 1, 8, "fork"),
        *(
            pytest.param(*case, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])
            for case in (
                ("ram", "kill", 200, 12, "fork"),
                ("drives", "kill", 200, 12, "fork"),
                ("ranks", "kill", 200, 12, "fork"),
                ("ram", "signals", 100, 12, "fork"),
                ("drives", "signals", 100, 12, "fork"),
                ("ranks", "signals", 100, 12, "fork"),
                ("ram", "kill", 10, 12, "fresh"),
                ("ranks", "kill", 5, 12, "fresh"),
            )
        ),
    ],
)
def test_every_run_that_is_struck_once_has_the_bits_of_one_that_is_not(
    tmp_path: Path, where: str, how: str, number: int, steps: int, start: str
) -> None:
    """At random moments of its life, by kill -9 or a signal: rows, last checkpoint, its record, and model."""
    sizes = map(str, (number, 6, steps))
    done = run_module("tests.train.struck_run", tmp_path, *sizes, where, how, start, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr[-5000:]
    met = json.loads(done.stdout.splitlines()[-1])
    print(number, where, how, start, met)
    assert met["strikes"] == number
    early = met.get("before the ranks meet", 0) + met.get("before the first step", 0)
    stopped = sum(count for what, count in met.items() if what.startswith("stopped"))
    assert number < 100 or (number - early if how == "kill" else stopped) >= number // 5, met
