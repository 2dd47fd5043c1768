"""What whole runs record: events of every end, the plan, the card, and a report that never fails a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import DivergedError, OutputError
from megatrain.train import loop
from megatrain.train.loop import train
from megatrain.train.records.json_lines import read_rows
from megatrain.train.report import page
from tests.train.project import make_config

SHORT: dict[str, Any] = {
    "train": {"steps": 4},
    "optim": {"warmup_steps": 0},
    "checkpoint": {"every": 2, "keep_last": 2},
}


def history(run: Path) -> list[tuple[str, int]]:
    return [(row["event"], row["step"]) for row in read_rows(run / "events.jsonl")]


def test_run_that_fails_and_goes_on_has_one_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = loop.train_step

    def fail_third(run: Any) -> Any:
        if run.step == 2:
            raise DivergedError("nothing is finite")
        return step(run)

    monkeypatch.setattr(loop, "train_step", fail_third)
    with pytest.raises(DivergedError):
        train(make_config(tmp_path, **SHORT))
    run = tmp_path / "run"
    assert history(run) == [("start", 0), ("checkpoint", 2), ("error", 2)]
    *_, error = read_rows(run / "events.jsonl")
    assert (error["text"], error["exit_code"]) == ("nothing is finite", 5)
    assert '"state": "failed"' in (run / "report.html").read_text()
    monkeypatch.setattr(loop, "train_step", step)
    train(make_config(tmp_path, **SHORT))
    assert history(run)[3:] == [("resume", 2), ("checkpoint", 4), ("end", 4)]
    assert '"state": "done"' in (run / "report.html").read_text()
    plan = json.loads((run / "plan.json").read_text())
    spans = plan["timeline"]
    assert {span[1] for span in spans} >= {"forward", "backward", "update"}
    assert max(span[3] for span in spans) == pytest.approx(plan["step_s"], rel=1e-3)
    card = (run / "hf/README.md").read_text()
    assert f"| training, mean of the last steps | 4 | {_mean_loss(run):.4f} |" in card
    assert "| steps | 4 |" in card
    assert str(tmp_path) not in card


def _mean_loss(run: Path) -> float:
    losses = [row["loss"] for row in read_rows(run / "metrics.jsonl")]
    assert len(losses) == 4
    return float(sum(losses)) / 4


def test_report_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OutputError("cannot write it: No space left on device")

    monkeypatch.setattr(page, "write_report", fail)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        train(make_config(tmp_path, **SHORT))
    (told,) = [message for message in caplog.messages if "report.html" in message]
    assert told.endswith("(cannot write it: No space left on device); the run does not need it")
    assert history(tmp_path / "run")[-1] == ("end", 4)


@pytest.mark.parametrize("setting", ["off", "no plotly"])
def test_run_without_report_or_without_plotly_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    if setting == "no plotly":
        monkeypatch.setattr(page, "is_plotly_there", lambda: False)
    with caplog.at_level(logging.INFO, logger="megatrain"):
        train(make_config(tmp_path, **SHORT, log={"report": setting != "off"}))
    assert not (tmp_path / "run/report.html").exists()
    assert ("pip install plotly" in caplog.text) == (setting == "no plotly")
    assert (tmp_path / "run/hf/README.md").is_file()
