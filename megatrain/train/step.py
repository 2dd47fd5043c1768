"""One optimizer step of a run, and its measurements."""

from __future__ import annotations

import math
import time
from typing import Any

from megatrain.model.shares import count_targets
from megatrain.stream.report import StepReport
from megatrain.train.faults.replay import Replay, require_data
from megatrain.train.faults.smaller_rounds import forward_backward
from megatrain.train.planning.allocation import check_allocated
from megatrain.train.ranks import count_written
from megatrain.train.records.measured import measured
from megatrain.train.records.metrics import StepMetrics
from megatrain.train.run import Run


def train_step(run: Run) -> StepMetrics:
    """Do one optimizer step."""
    started = time.monotonic()
    callbacks, policy = run.callbacks, run.config.train.on_spike
    run.doing(f"at step {run.step + 1}")
    run.note_position()
    if run.optimizer.memory_watch is not None:
        run.optimizer.memory_watch.step = run.step + 1
    micro_batches = next(run.loader)
    seeds = run.micro_batch_seeds()
    num_targets = sum(map(count_targets, micro_batches))

    replay = Replay(run, micro_batches, seeds) if policy == "replay" else None
    callbacks.call("on_step_begin")
    with run.watched():
        loss, shown = forward_backward(run, micro_batches, seeds)
    callbacks.call("on_pre_optimizer_step")
    lr = float(run.optimizer.param_groups[0]["lr"])  # the schedule's, unless a callback has changed it
    # With `warn`, the loss is read after the step, since the device is at work until then.
    with run.watched():
        highest = None if policy == "warn" else run.spikes.take(float(loss))
    grad_norm, is_skipped = None, highest is not None
    experts = verdict = None
    if highest is not None and replay is not None:
        experts = run.experts.take()  # not what the replays count
        verdict = replay.judge(float(loss), highest)
        require_data(verdict, run, float(loss), highest)
    with run.watched():
        if is_skipped:
            run.engine.zero_grad()
        else:
            stats = run.optimizer.step()
        run.scheduler.step()
        run.end_update(num_targets)
        # `float(loss)` blocks until the device has finished; only the updates still run.
        loss_value = float(loss)
    if not is_skipped:
        grad_norm, is_skipped = stats.grad_norm, stats.skipped
        if policy == "warn":
            highest = run.spikes.take(loss_value)
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if is_skipped else 0
    run.last_good.take(is_skipped=is_skipped or not math.isfinite(loss_value))
    experts = run.experts.take() if verdict is None else experts
    callbacks.call("on_optimizer_step")
    report = None if highest is not None and policy != "warn" else run.engine.last_step
    if run.planned is not None and not run.is_checked:
        check_allocated(run.engine, run.planned.plan, run.config.memory.on_mismatch)
        run.is_checked = True
    if run.elastic is not None and report is not None:
        with run.watched(f"the planning after step {run.step}", moves=True):
            change = run.elastic.after_step(report)
        if change:
            run.tell("replan", reason=change)

    num_tokens = run.loader.num_tokens
    seconds = time.monotonic() - started
    if run.hang_watch is not None:
        run.hang_watch.took(seconds)
    if run.ranks.size > 1 and run.config.memory.drives:
        count_written(run.health, run.ranks)
    with run.watched(f"the look at the device after step {run.step}", moves=True):
        vitals = run.health.sample()
    return StepMetrics(
        step=run.step,
        loss=loss_value,
        grad_norm=grad_norm,
        lr=lr,
        tokens=run.tokens,
        targets=run.targets,
        tokens_per_s=num_tokens / seconds,
        seconds=seconds,
        skipped=is_skipped,
        shown=shown,
        spike_above=highest,
        replay=None if verdict is None else verdict.value,
        host_bytes=run.engine.host_bytes,
        device_bytes=run.engine.device_bytes_peak,
        **({} if report is None else _measured(run, report, num_tokens)),
        power_w=vitals.power_w,
        temperature_c=vitals.temperature_c,
        throttled=vitals.throttled,
        energy_j_per_token=None if vitals.energy_j is None else vitals.energy_j / max(1, num_tokens),
        experts=experts,
        ecc_errors=vitals.ecc_errors,
        swap_bytes=vitals.swap_bytes,
        drive_written_bytes=vitals.drive_written_bytes,
    )


def _measured(run: Run, report: StepReport, num_tokens: int) -> dict[str, Any]:
    flops = run.engine.arrangement.flops.model_flops(run.config.data.seq_len)
    return measured(report, model_flops=num_tokens * flops, num_ranks=run.ranks.size)
