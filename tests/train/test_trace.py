"""The trace of a run: it opens, each operation of the program is in it once, and rows do not overlap."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.config import dump_config
from megatrain.config.decided import as_settings
from megatrain.errors import OutputError
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.step import step_program
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import Cause, Span, Wait
from megatrain.stream.report import StepReport
from megatrain.train.commands import trace as traces
from megatrain.train.commands.trace import trace, trace_events
from megatrain.train.run import Run, prepare
from tests.train.project import make_config

STEPS = 2


def events_of(file: Path, category: str | None = None) -> list[dict[str, Any]]:
    events = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if category is None or event.get("cat") == category]


def program_of(engine: Engine, num_micro_batches: int, lockstep: int) -> Counter[str]:
    """Count the operations of a step, as the schedule lists them, by their labels."""
    spec = engine.executor.spec
    program = step_program(spec, [[1] * lockstep] * (num_micro_batches // lockstep))
    visits = ("forward", "backward")
    return Counter(
        str(operation)
        for operation in program.operations
        if operation.label not in ("head", "head backward")
        and not (operation.label in visits and operation.block in spec.outer)  # one span for all of these
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("lockstep", [1, 2])
def test_each_operation_of_the_program_is_one_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, lockstep: int
) -> None:
    runs: list[Run] = []

    def keep(*arguments: Any, **options: Any) -> Run:
        runs.append(prepare(*arguments, **options))
        return runs[0]

    monkeypatch.setattr(traces, "prepare", keep)
    memory = {
        "num_slots": 2,
        "num_gradient_buffers": 1,
        "lockstep": lockstep,
        "resident_blocks": 0,
        "fragments": False,
        "gradients": "host",
        "sums": "device",
    }
    config = make_config(tmp_path, train={"device": device, "reproducible": True}, memory=memory)
    out = tmp_path / "trace.json"
    reports = trace(config, out, steps=STEPS)
    expected = program_of(runs[0].engine, 2, lockstep)
    found = Counter(event["name"] for event in events_of(out, "operation"))
    on_device = sorted(runs[0].engine.executor.states.blocks)
    pushes = {label: found.pop(label) for label in list(found) if label.startswith("push")}
    assert pushes == {f"push      b{block}": 1 for block in on_device}  # once, when the trace ends
    assert found == {label: STEPS * count for label, count in expected.items()}
    assert not (tmp_path / "run").exists()

    def total(kind: str, part: str = "") -> int:
        return sum(count for label, count in found.items() if label.startswith(kind) and part in label)

    assert total("fetch", " s") == sum(report.fetches for report in reports)
    assert total("offload", " g") == sum(report.offloads for report in reports)
    assert bytes_of(out, Lane.FETCH) == sum(report.fetch_bytes for report in reports)
    assert bytes_of(out, Lane.OFFLOAD) == sum(report.offload_bytes for report in reports)
    assert bytes_of(out, Lane.HOST) == sum(report.update_bytes for report in reports)


def bytes_of(file: Path, lane: Lane) -> int:
    tid = next(
        event["tid"]
        for event in events_of(file)
        if event["name"] == "thread_name" and event["args"]["name"] == lane.value
    )
    events = [
        event
        for event in events_of(file, "operation")
        if event["tid"] == tid and not event["name"].startswith(("pull", "push"))
    ]
    return sum(event.get("args", {}).get("bytes", 0) for event in events)


def test_rows_are_the_lanes_and_their_spans_do_not_overlap(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    trace(make_config(tmp_path, train={"device": "emulated"}, memory={"activations": "offload"}), out)
    names = {e["tid"]: e["args"]["name"] for e in events_of(out) if e["name"] == "thread_name"}
    assert list(names.values()) == ["caller", "compute", "fetch", "offload", "save", "restore", "host"]
    orders = {e["tid"]: e["args"]["sort_index"] for e in events_of(out) if e["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(orders, key=orders.__getitem__)] == list(names.values())
    assert {e["name"] for e in events_of(out) if e["ph"] == "i"} == {"step 1", "step 2"}
    for tid, name in names.items():
        row = [e for e in events_of(out) if e.get("tid") == tid and e.get("cat") in ("operation", "other")]
        row.sort(key=lambda event: event["ts"])
        for event, after in itertools.pairwise(row):
            assert event["ts"] + event["dur"] <= after["ts"] + 0.01, f"{event} and {after} in {name}"
        assert all(event["ts"] >= 0 for event in row)
    assert not [event for event in events_of(out) if not event["name"].strip()]


def test_waits_nest_in_their_row() -> None:
    spans = [
        Span(Lane.FETCH, "fetch     b0 s0", 1.0, 2.0, 64.0),
        Span(Lane.FETCH, "", 2.0, 2.0),
        Span(Lane.FETCH, "fetch     b1 s1", 3.0, 4.0, 64.0),
        Span(Lane.COMPUTE, "backward  b0 s0", 0.0, 9.0),
    ]
    waits = [
        Wait(Cause(Lane.FETCH, Lane.HOST, "working"), 1.5, 2.0),  # its thread slept, and kept its timetable
        Wait(Cause(Lane.COMPUTE, Lane.RESTORE, "restored"), 2.0, 1.0),
    ]
    events = [event for event in trace_events(spans, waits, [0.5]) if event["ph"] == "X"]
    assert [(e["name"].split()[0], e["ts"] / 1e6, e["dur"] / 1e6, e.get("args")) for e in events] == [
        ("backward", 0.0, 9.0, None),
        ("fetch", 1.0, 1.0, {"bytes": 64}),
        ("fetch", 3.0, 1.0, {"bytes": 64}),
        ("wait", 2.0, 1.0, {"for": "host", "buffer": "working"}),
        ("wait", 2.0, 1.0, {"for": "restore", "buffer": "restored"}),
    ]


def test_command_reads_a_run_or_a_file_and_touches_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(as_settings(config)))
    before = {path: path.stat().st_mtime_ns for path in [run, *run.iterdir()]}
    for number, path in enumerate((run, run / "config.yaml")):
        out = tmp_path / f"{number}.json"
        with pytest.raises(SystemExit) as caught:
            main(["trace", str(path), "--out", str(out), "--steps", "1", "train.micro_batch_size=1"])
        assert caught.value.code in (0, None)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == str(out)
        assert lines[0].split() == ["step", "1"]
        for row in ("seconds", "bound", "MFU", "compute, s", "fetches"):
            assert [line for line in lines if line.startswith(row)], row
        assert events_of(out, "operation")
    assert {path: path.stat().st_mtime_ns for path in [run, *run.iterdir()]} == before


def test_place_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(OutputError, match=r"is a directory; give a file for the trace with --out FILE"):
        trace(config, tmp_path)
    with pytest.raises(OutputError, match=r"nothing/t\.json is in a directory that does not exist"):
        trace(config, tmp_path / "nothing/t.json")


def test_table_has_a_column_per_step() -> None:
    report = StepReport(
        fetches=4,
        offloads=3,
        fetch_bytes=1 << 20,
        offload_bytes=1 << 21,
        update_bytes=1 << 30,
        saved_bytes=0,
        restored_bytes=0,
        seconds=2.0,
        lane_seconds={"compute": 1.5, "host": 0.5},
        waits={"compute<-fetch slot": 0.25},
        tokens=1000,
        model_flops=1e12,
        hardware_flops=2e12,
        matmul_peak=None,
        bound="compute",
        bound_s=1.5,
    )
    assert traces.describe([report, report]) == "\n".join(
        [
            "step                             1              2",
            "seconds                          2              2",
            "tokens/s                       500            500",
            "bound                compute x1.33  compute x1.33",
            "MFU                              -              -",
            "model GFLOP/s                500.0          500.0",
            "hardware GFLOP/s           1,000.0        1,000.0",
            "compute, s                     1.5            1.5",
            "host, s                        0.5            0.5",
            "fetches                 4, 1.0 MiB     4, 1.0 MiB",
            "offloads                3, 2.0 MiB     3, 2.0 MiB",
            "updates                   1.00 GiB       1.00 GiB",
            "compute<-fetch slot           0.25           0.25",
        ]
    )
