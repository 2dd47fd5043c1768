"""How long a run takes to stop is said before it is asked to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.plan.cost.saved_bytes import checkpoint_bytes
from megatrain.train.planning.plan_json import plan_json
from megatrain.train.planning.plan_report import money_of, plan_text
from megatrain.train.planning.plan_run import Planned
from megatrain.train.planning.save_interval import COMMON_RATE, planned_save
from megatrain.train.planning.stop_time import StopTime, stop_time
from tests.train.project import make_config
from tests.train.screen.test_start import planned_as

NBYTES = 127_000_000_000


def without_drives(planned: Planned) -> Planned:
    request = planned.request
    return replace(planned, request=replace(request, spec=replace(request.spec, drives=None)))


def of(planned: Planned, monkeypatch: pytest.MonkeyPatch, **given: Any) -> StopTime:
    monkeypatch.setattr("megatrain.train.planning.save_interval.checkpoint_bytes", lambda *_: NBYTES)
    return stop_time(planned.config, planned.request, planned.plan, **given)


@pytest.mark.parametrize(
    ("checkpoint", "step_s", "evaluation_s", "at_s"),
    [
        ({}, 200.0, 0.0, 200.0),
        ({}, 34.0, 0.0, 127.0),  # the checkpoint that is being written when the wish comes
        ({}, 34.0, 150.0, 150.0),
        ({"background": False}, 34.0, 0.0, 34.0),
        ({"every": None}, 34.0, 0.0, 34.0),
    ],
)
def test_a_stop_takes_what_it_is_at_and_a_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: dict[str, Any],
    step_s: float,
    evaluation_s: float,
    at_s: float,
) -> None:
    planned = planned_as(make_config(tmp_path, checkpoint=checkpoint), step_s=step_s)
    stop = of(without_drives(planned), monkeypatch, evaluation_s=evaluation_s)
    assert (stop.at_s, stop.save_s, stop.seconds) == (at_s, NBYTES / COMMON_RATE, at_s + 127.0)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_ranks_may_be_writing_a_checkpoint_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_nodes: int
) -> None:
    planned = without_drives(planned_as(make_config(tmp_path), step_s=34.0))
    batch = replace(planned.request.batch, num_ranks=2, num_nodes=num_nodes)
    planned = replace(planned, request=replace(planned.request, batch=batch))
    assert of(planned, monkeypatch).at_s == 127.0


def test_state_on_drives_is_read_before_it_is_written() -> None:
    rates = {"write_bytes_per_s": 4e9, "read_bytes_per_s": 2e9}
    assert planned_save(nbytes=NBYTES, away_bytes=100_000_000_000, **rates) == pytest.approx(50.0 + 6.75)


def test_a_scheduler_is_to_leave_half_as_much_again_in_whole_minutes() -> None:
    stop = StopTime(at_s=200.0, save_s=127.0)
    assert stop.told_s == 540  # of 490.5
    assert stop.text == (
        "within about 5m 27s: 3m 20s for what it is at and 2m 07s for a save (Slurm: --signal=USR1@540)"
    )
    assert StopTime(at_s=0.01, save_s=0.01).told_s == 60


def test_the_plan_says_it(tmp_path: Path) -> None:
    planned = without_drives(planned_as(make_config(tmp_path), step_s=3600.0))
    save_s = checkpoint_bytes(planned.request.anatomy, planned.request.optimizer) / COMMON_RATE
    money = money_of(planned, None)
    (line,) = [line for line in plan_text(planned, money, []).splitlines() if line.startswith(" stop ")]
    assert (
        "within about 1h 00m: 1h 00m for what it is at and 0m 00s for a save (Slurm: --signal=USR1@5460)"
        in line
    )
    assert plan_json(planned, money, [])["stop"] == {
        "at_s": 3600.0,
        "save_s": save_s,
        "seconds": 3600.0 + save_s,
        "told_s": 5460,
    }
