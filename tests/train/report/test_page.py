"""The report: what is in it, that nothing in it reaches out or runs, and that a browser draws it."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.errors import ConfigError
from megatrain.train.report import page
from megatrain.train.report.collect import read_run
from megatrain.train.report.page import page_data, write_report
from megatrain.train.report.trace_spans import trace_spans
from tests.train.report.browser import drawn, needs_browser
from tests.train.report.run_files import write_run

NASTY = "</script><img src=x onerror=alert(1)>"
EVENTS: list[tuple[str, int, dict[str, Any]]] = [
    ("start", 0, {"steps": 100, "ranks": 2, "nodes": 1, "shards": 2}),
    ("evaluation", 10, {"name": NASTY, "loss": 3.5}),
    ("evaluation", 20, {"name": NASTY, "loss": 2.5}),
    ("end", 20, {"steps": 20, "waited_s": [0.5, 1.5]}),
    ("error", 20, {"text": NASTY, "exit_code": 2}),
    ("ranks", 20, {"codes": {"1": -9}, "sentences": {"0": NASTY}, "left": 0}),
]


def test_data_of_the_page(tmp_path: Path) -> None:
    data = page_data(read_run(write_run(tmp_path / "a", events=EVENTS)))
    assert data["state"] == "failed"
    assert data["evaluations"] == {NASTY: [[10, 3.5], [20, 2.5]]}
    assert data["plan"] == {
        "step_s": 0.5,
        "tokens_per_s": 2048.0,
        "bound": "compute",
        "bounds_s": {"compute": 0.45},
    }
    device, host = data["memory"]
    assert device["text"] == "1.50 GiB planned, 1.00 GiB seen at the peak, 8.00 GiB there"
    assert [pool[:2] for pool in host["pools"]] == [["working", 2**31], ["exp_avg", 2**30]]
    assert data["timeline"] == [["fetch", "fetch", 0.0, 0.1], ["compute", "forward", 0.1, 0.3]]
    assert ["log.webhook", "https://hooks.example/..."] in data["settings"]
    assert [event[2] for event in data["events"]] == [event for event, _, _ in EVENTS]


def test_page_is_one_private_file_without_an_address_outside(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", events=EVENTS)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run)])
    assert not ended.value.code
    assert stat.S_IMODE((run / "report.html").stat().st_mode) == 0o600
    text = (run / "report.html").read_text()
    assert text.count("</script>") == 3, "no text of the run ends a script"
    ours = text[: text.index("<script>")] + text[text.index("<script>const DATA") :]
    assert re.findall(r"(?:src|href)=[\"'](?!data:)", ours) == []
    assert "https://" not in ours.replace("https://hooks.example/...", "")
    assert "secret-token" not in text


def test_missing_plotly_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page.plotly_file.cache_clear()
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install plotly"):
        write_report(write_run(tmp_path / "a"), tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_timeline_is_the_measured_one_where_there_is_a_trace(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    lane = {"ph": "M", "pid": 1, "name": "thread_name", "tid": 3, "args": {"name": "fetch"}}
    step = {"ph": "i", "s": "g", "pid": 1, "tid": 0}
    span = {"ph": "X", "pid": 1, "tid": 3, "dur": 5e5}
    events = [
        lane,
        {**step, "name": "step 1", "ts": 1e6},
        {**step, "name": "step 2", "ts": 3e6},
        {**span, "name": "fetch layers.0", "cat": "operation", "ts": 1.25e6},
        {**span, "name": "wait", "cat": "wait", "ts": 1.75e6},
        {**span, "name": "fetch layers.1", "cat": "operation", "ts": 3.25e6},
    ]
    (run / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert trace_spans(run / "trace.json") == [("fetch", "fetch", 0.25, 0.75)]
    data = page_data(read_run(run))
    assert (len(data["timeline"]), data["timeline_source"]) == (1, "measured (trace.json)")
    (run / "trace.json").write_text("{}")
    assert page_data(read_run(run))["timeline_source"] == "planned"


@needs_browser
def test_browser_draws_every_part_and_runs_nothing_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", events=EVENTS, exchanged_bytes=2**20)
    write_report(run, run / "report.html")
    text = drawn(f"file://{run}/report.html", tmp_path / "profile")
    assert 'data-drawn="yes"' in text, text[-3000:]
    assert "CONSOLE" not in text
    body = text[: text.index("<script>")]  # scripts come after what they draw
    titles = re.findall(r"<h2>([^<]*)</h2>", body)
    assert titles == [
        "Loss",
        "Tokens per second",
        "Learning rate",
        "Gradient norm",
        "Where a step's time went",
        "Longest waits",
        "Timeline of a step by lane",
        "Waits of ranks for each other",
        "Between ranks in a step",
        "Ranks that were lost",
        "Memory by tier",
        "Plan and fact",
        "Events",
        "Settings",
        "Environment",
    ]
    assert body.count("main-svg") >= 8
    assert "<img" not in body
