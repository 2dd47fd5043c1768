"""`megatrain train --dry-run` plans a run, takes two real steps, and compares them with the plan."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.config import Config
from megatrain.hardware import GIB, resident_bytes
from megatrain.stream.report import StepReport
from megatrain.train.caller import NOBODY, Caller
from megatrain.train.planning.plan_run import Planned
from megatrain.train.resume.state_commits import drives_apart
from megatrain.train.run import Run, prepare
from megatrain.train.step import train_step

_LANES = {
    "compute": "compute",
    "fetch": "copies to the device",
    "offload": "copies to the host",
    "host": "optimizer",
    "nvme_read": "drive reads",
    "nvme_write": "drive writes",
}


def dry_run(
    config: Config,
    show: Callable[[str], object],
    caller: Caller = NOBODY,
) -> None:
    """Plan a run, take two steps of it, and show both side by side; nothing is written.

    Args:
        config: The settings of a run; its `out` is neither read nor written.
        show: The function that is given the lines.
        caller: The folders that are kept between runs, and the functions that measure and show progress.

    Raises:
        MegatrainError: `prepare` raises it.
    """
    with drives_apart(config) as apart:  # the run's own commits stay as they are
        _try(apart, show, caller)


def _try(config: Config, show: Callable[[str], object], caller: Caller) -> None:
    began = resident_bytes()
    run = prepare(config, caller=caller)
    caller.progress("taking two steps")
    try:
        train_step(run)  # the first step allocates, compiles, and touches memory for the first time
        row = train_step(run)
        run.engine.settle()
        report = run.engine.last_step
        if run.planned is None:
            show("no plan: the model cannot be counted; two steps were taken as rules of thumb say")
            show(f"step      {row.seconds:.4g} s, {row.tokens_per_s:,.0f} tokens/s")
            return
        for line in _compare(run, run.planned, report, row.seconds, resident_bytes() - began):
            show(line)
    finally:
        run.engine.close(removes=True)


def _compare(run: Run, planned: Planned, report: StepReport, seconds: float, grown: int) -> list[str]:
    """Return a table of planned and measured values."""
    engine, plan, verdict = run.engine, planned.plan, planned.verdict
    lines = [
        f"{'verdict':<26}{verdict.sentence}",
        f"{'':<26}{'planned':>12}{'seen':>12}",
        _row("host planes", plan.host_plane_bytes, engine.host_bytes),
        _row("process memory", plan.tier_bytes("ram"), grown) + "   (grown since the start)",
    ]
    if "device" in plan.limits or plan.tier_bytes("device"):
        lines.append(_row("device pools", plan.device_pool_bytes, engine.lanes.device_bytes))
        if engine.lanes.device.type != "cpu":
            lines.append(_row("device peak", plan.tier_bytes("device"), engine.device_bytes_peak))
    lines.append(f"{'step':<26}{plan.step_s:>10.4g} s{seconds:>10.4g} s   ({_ratio(seconds, plan.step_s)})")
    for lane, name in _LANES.items():
        if name in plan.bounds_s and lane in report.lane_seconds:
            expected, seen = plan.bounds_s[name], report.lane_seconds[lane]
            lines.append(f"  {name:<24}{expected:>10.4g} s{seen:>10.4g} s")
    for name, seen in (("fetched", report.fetch_bytes), ("offloaded", report.offload_bytes)):
        lines.append(_row(f"  {name}", plan.bytes_per_step[name], seen))
    lines.append(f"bound: planned {plan.bound}, seen {report.bound}")
    return lines


def _row(name: str, planned: int, seen: int) -> str:
    return f"{name:<26}{_gib(planned):>12}{_gib(seen):>12}   ({_ratio(seen, planned)})"


def _ratio(seen: float, planned: float) -> str:
    return f"{seen / planned - 1:+.1%}" if planned else "none planned"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.4f} GiB"
