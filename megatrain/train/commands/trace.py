"""`megatrain trace` runs a few steps and writes when each lane did what, for Perfetto or Chrome.

The trace has a row per lane and a span with its bytes per operation of the steps' programs. Between two
visits of a block, compute works on everything but decoder layers (embedding, head and loss) in spans named
`outer`. Waits are spans with their cause. The training result is dropped, and the run's directory is not
touched. Each rank is a process with rows of its own, and the first one writes them all.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.distributed.alone import ALONE, Alone
from megatrain.errors import ConfigError, OutputError
from megatrain.plan.program.kinds import Lane
from megatrain.plan.program.operations import KINDS
from megatrain.stream.lanes import Record, Span, Wait
from megatrain.stream.report import StepReport
from megatrain.train.caller import NOBODY, Caller
from megatrain.train.records.metrics import format_bytes
from megatrain.train.report.runs import table
from megatrain.train.resume.state_commits import drives_apart
from megatrain.train.run import prepare
from megatrain.train.shards import with_shards
from megatrain.train.step import train_step

if TYPE_CHECKING:
    from megatrain.distributed.ranks import Ranks

_DRIVES = (Lane.READ, Lane.PAGE, Lane.RECALL, Lane.WRITE, Lane.STOW)
_RANKS = (Lane.GATHER, Lane.EXCHANGE, Lane.SPREAD)
_COPIES = (Lane.FETCH, Lane.OFFLOAD, Lane.SAVE, Lane.RESTORE)
_ROWS = (Lane.CALLER, Lane.COMPUTE, *_COPIES, *_RANKS, Lane.HOST, *_DRIVES)
_PID = 1


def trace(
    config: Config,
    out: Path,
    *,
    steps: int = 2,
    caller: Caller = NOBODY,
    ranks: Ranks | Alone = ALONE,
) -> list[StepReport]:
    """Run one step to warm up and `steps` more, and write the trace of the latter.

    With deferred updates, each step's host lane works for the step before; the trace continues until the last
    step's updates are done.

    Args:
        config: The settings of a run; its `out` is neither read nor written.
        out: The JSON file to write.
        steps: The number of steps to trace.
        caller: The folders that are kept between runs, and the functions that measure and show progress.
        ranks: The ranks that train together.

    Returns:
        The report of each traced step, for this rank.

    Raises:
        MegatrainError: `prepare` raises it; it is OutputError if `out` cannot be written.
        ConfigError: Several ranks have state on drives, where each would use a place of its own.
    """
    if ranks.size > 1 and config.memory.drives:
        raise ConfigError("memory.tiers has drives, which trace tries out with one rank; start it as one")
    if ranks.rank == 0:
        _check_writable(out)
    config = with_shards(config, ranks.size, None)
    with drives_apart(config) as apart:
        return _trace(apart, out, steps, caller, ranks)


def _trace(config: Config, out: Path, steps: int, caller: Caller, ranks: Ranks | Alone) -> list[StepReport]:
    run = prepare(config, caller=caller, ranks=ranks)
    caller.progress(f"taking {1 + steps} steps")
    meter = run.engine.meter
    records: list[Record] = []
    reports, began_s = [], []
    try:
        train_step(run)  # the first step allocates, compiles, and touches memory for the first time
        run.engine.settle()
        meter.take()
        meter.on_record = records.append
        for _ in range(steps):
            began_s.append(time.perf_counter())
            train_step(run)
            reports.append(run.engine.last_step)
        run.engine.settle()
        run.engine.lanes.drain()
        meter.take()
    finally:
        meter.on_record = None
        run.engine.close(removes=True)
    spans = [span for record in records for span in record.spans]
    waits = [wait for record in records for wait in record.waits]
    events = _of_all(ranks, trace_events(spans, waits, began_s), _zero_s(spans, waits, began_s))
    if ranks.rank > 0:
        return reports
    content = {"traceEvents": events, "displayTimeUnit": "ms"}
    try:
        out.write_text(json.dumps(content) + "\n")
    except OSError as error:
        raise OutputError(f"{out} cannot be written ({error.strerror})") from error
    return reports


def _of_all(ranks: Ranks | Alone, events: list[dict[str, Any]], zero_s: float) -> list[dict[str, Any]]:
    """Return the events of all ranks on one time axis, each rank as a process.

    Processes of a machine share a clock. Other nodes are taken to leave a rendezvous at the same time.
    """
    if ranks.size == 1:
        return events
    ranks.meet()
    met_s = time.perf_counter()
    found = ranks.gather_values([ranks.node, zero_s, met_s, events])
    first_met_s = found[0][2]
    zeros_s = [zero - (0.0 if node == found[0][0] else met - first_met_s) for node, zero, met, _ in found]
    merged = []
    for rank, (zero, (*_, rows)) in enumerate(zip(zeros_s, found, strict=True)):
        for row in rows:
            row["pid"] = _PID + rank
            if row["name"] == "process_name":
                row["args"] = {"name": f"rank {rank}"}
            if "ts" in row:
                row["ts"] = round(row["ts"] + (zero - min(zeros_s)) * 1e6, 3)
            merged.append(row)
    return merged


def _zero_s(spans: Sequence[Span], waits: Sequence[Wait], began_s: Sequence[float]) -> float:
    """Return the time at which a trace begins."""
    starts = [span.start_s for span in spans if span.label] + [wait.start_s for wait in waits]
    return min([*starts, *began_s], default=0.0)


def _check_writable(out: Path) -> None:
    if out.is_dir() or not out.absolute().parent.is_dir():
        what = "is a directory" if out.is_dir() else "is in a directory that does not exist"
        raise OutputError(f"{out} {what}; give a file for the trace with --out FILE")


def trace_events(
    spans: Sequence[Span], waits: Sequence[Wait], began_s: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the events of a trace: spans and waits as complete events, the begin of each step as an instant.

    Spans without a label are ordering marks that take no time, and are left out.
    """
    named = sorted((span for span in spans if span.label), key=lambda span: span.start_s)
    zero_s = _zero_s(named, waits, began_s)

    def common(name: str, category: str, lane: Lane, start_s: float, end_s: float) -> dict[str, Any]:
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "pid": _PID,
            "tid": _ROWS.index(lane),
            "ts": round((start_s - zero_s) * 1e6, 3),
            "dur": round(max(0.0, end_s - start_s) * 1e6, 3),
        }

    events = [{"name": "process_name", "ph": "M", "pid": _PID, "args": {"name": "megatrain"}}]
    used = {span.lane for span in named}
    for number, lane in enumerate(_ROWS):
        if lane in (*_RANKS, *_DRIVES) and lane not in used:
            continue
        row: dict[str, Any] = {"ph": "M", "pid": _PID, "tid": number}
        events.append({**row, "name": "thread_name", "args": {"name": lane.value}})
        events.append({**row, "name": "thread_sort_index", "args": {"sort_index": number}})
    for span in named:
        category = "operation" if span.label.split()[0] in KINDS else "other"
        event = common(span.label, category, span.lane, span.start_s, span.end_s)
        events.append({**event, "args": {"bytes": int(span.work)}} if span.work else event)
    for wait in waits:
        cause, row_spans = wait.cause, [span for span in named if span.lane is wait.cause.waiting]
        for start_s, end_s in _outside(wait, row_spans):
            event = common("wait", "wait", cause.waiting, start_s, end_s)
            events.append({**event, "args": {"for": cause.owner.value, "buffer": cause.buffer}})
    for number, start_s in enumerate(began_s, start=1):
        ts = round((start_s - zero_s) * 1e6, 3)
        events.append({"name": f"step {number}", "ph": "i", "s": "g", "pid": _PID, "tid": 0, "ts": ts})
    return events


def _outside(wait: Wait, spans: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """Yield a wait whole if it lies inside a span, otherwise its parts outside of all spans: rows must nest.

    The times of some lanes (of a device or a timetable) differ from those of the thread that waits for them.
    """
    start_s, stop_s = wait.start_s, wait.start_s + wait.seconds
    for span in spans:
        if span.start_s <= start_s and stop_s <= span.end_s:
            yield start_s, stop_s
            return
        if span.end_s <= start_s or span.start_s >= stop_s:
            continue
        if span.start_s > start_s:
            yield start_s, span.start_s
        start_s = max(start_s, span.end_s)
    if start_s < stop_s:
        yield start_s, stop_s


def describe(reports: Sequence[StepReport]) -> str:
    """Return the reports as a table: one column per step."""
    rows: dict[str, list[str]] = {"step": [str(number) for number in range(1, len(reports) + 1)]}

    def add(name: str, values: Iterable[str]) -> None:
        rows[name] = list(values)

    add("seconds", (f"{report.seconds:.4g}" for report in reports))
    add("tokens/s", (f"{report.tokens / report.seconds:,.0f}" for report in reports))
    add("bound", (f"{report.bound} x{report.over_bound:.2f}" for report in reports))
    add("MFU", ("-" if report.mfu is None else f"{report.mfu:.2%}" for report in reports))
    add("model GFLOP/s", (f"{report.model_flops_per_s / 1e9:,.1f}" for report in reports))
    add("hardware GFLOP/s", (f"{report.hardware_flops_per_s / 1e9:,.1f}" for report in reports))
    for lane in _ROWS:
        if any(report.lane_seconds.get(lane.value) for report in reports):
            add(f"{lane.value}, s", (f"{report.lane_seconds.get(lane.value, 0.0):.4g}" for report in reports))
    add("fetches", (f"{report.fetches}, {format_bytes(report.fetch_bytes)}" for report in reports))
    add("offloads", (f"{report.offloads}, {format_bytes(report.offload_bytes)}" for report in reports))
    if any(report.drive_read_bytes for report in reports):
        add("from drives", (format_bytes(report.drive_read_bytes) for report in reports))
        add("to drives", (format_bytes(report.drive_write_bytes) for report in reports))
    if any(report.saved_bytes for report in reports):
        add("saved", (format_bytes(report.saved_bytes) for report in reports))
        add("restored", (format_bytes(report.restored_bytes) for report in reports))
    add("updates", (format_bytes(report.update_bytes) for report in reports))
    longest = sorted({name for report in reports for name in list(report.waits)[:3]})
    for name in longest:
        add(name, (f"{report.waits.get(name, 0.0):.4g}" for report in reports))
    return table(([name, *values] for name, values in rows.items()), right=range(1, len(reports) + 1))
