"""The training loop: the whole step in one screen, and what surrounds it."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megatrain.checkpoint.format import Manifest
from megatrain.checkpoint.load import find, newest_whole, verify
from megatrain.checkpoint.save import save
from megatrain.config import Config
from megatrain.errors import CheckpointError, DivergedError, OutputError, os_errors
from megatrain.model.head import count_targets
from megatrain.stream.machine import Measure
from megatrain.train.directory import RunDirectory
from megatrain.train.export import export_model, is_exported
from megatrain.train.metrics import MetricsLog, Progress, StepMetrics
from megatrain.train.planning.allocation import check_allocated
from megatrain.train.planning.timeline import planned_run
from megatrain.train.report.card import model_card
from megatrain.train.report.record import recorded
from megatrain.train.run import Run, changed_settings, prepare
from megatrain.train.state_commits import find_commit
from megatrain.train.way_back import way_back

_log = logging.getLogger(__name__)

_NUM_WAITS = 3
"""Of the longest waits of a step that its row names."""

EXIT_STOPPED = 75
"""EX_TEMPFAIL: stopped by a signal after saving; the same command goes on."""


def train_step(run: Run) -> StepMetrics:
    """Do one optimizer step."""
    started = time.monotonic()
    micro_batches = next(run.loader)
    seeds = run.micro_batch_seeds()
    lr = float(run.scheduler.get_last_lr()[0])

    loss = run.engine.forward_backward(micro_batches, seeds=seeds)
    stats = run.optimizer.step()
    run.scheduler.step()
    # Here, where the step is over but for its updates, the launching thread waits for what compute has made.
    loss_value, grad_norm, is_skipped = float(loss), stats.grad_norm, stats.skipped
    report = run.engine.last_step
    if run.planned is not None and not run.is_checked:
        check_allocated(run.engine, run.planned.plan, run.config.memory.on_mismatch)
        run.is_checked = True
    if run.elastic is not None:
        change = run.elastic.after_step(report)
        if change:
            run.tell("replan", reason=change)

    num_tokens = sum(map(count_targets, micro_batches))
    run.step += 1
    run.tokens += num_tokens
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if is_skipped else 0
    seconds = time.monotonic() - started
    vitals = run.care.sample()
    return StepMetrics(
        step=run.step,
        loss=loss_value,
        grad_norm=grad_norm,
        lr=lr,
        tokens=run.tokens,
        tokens_per_s=num_tokens / seconds,
        seconds=seconds,
        skipped=is_skipped,
        host_bytes=run.engine.host_bytes,
        device_bytes=run.engine.device_bytes_peak,
        mfu=report.mfu,
        bound=report.bound,
        over_bound=report.over_bound,
        fetch_bytes=report.fetch_bytes,
        offload_bytes=report.offload_bytes,
        waits=dict(list(report.waits.items())[:_NUM_WAITS]),
        lane_seconds={name: round(busy_s, 6) for name, busy_s in report.lane_seconds.items()},
        power_w=vitals.power_w,
        temperature_c=vitals.temperature_c,
        throttled=vitals.throttled,
        energy_j_per_token=None if vitals.energy_j is None else vitals.energy_j / max(1, num_tokens),
        ecc_errors=vitals.ecc_errors,
        swap_bytes=vitals.swap_bytes,
        drive_written_bytes=vitals.drive_written_bytes,
    )


def train(
    config: Config, *, resume: str = "auto", measure: Measure | None = None, counts: Path | None = None
) -> Path:
    """Train, or go on training, and leave the model in `hf/` of the run directory.

    Args:
        config: Complete and checked.
        resume: `auto`, `no`, or the path of a checkpoint.
        measure: Returns this machine, for the plan; as in `machine_for`.
        counts: A folder in which counts of models are kept for the next plan; None: nowhere.

    Returns:
        The run directory.

    Raises:
        MegatrainError: Its subclasses carry the exit code.
        SystemExit: 75, after a signal stopped the run and its state was saved.
    """
    directory = RunDirectory(Path(config.out))
    directory.check()
    with directory.lock():
        directory.remove_leftovers()
        found = _find_checkpoint(directory, resume)
        step = 0 if found is None else found[1].step
        if found is not None and _is_finished(directory, config, found[1]):
            _log.info("%s is finished (%d steps); nothing to do", directory.path, step)
            changed = changed_settings(found[1].meta["config"], config)
            if changed:
                _log.warning(
                    "its settings differ (%s); give a new directory with --out to train with these",
                    "; ".join(changed),
                )
            return directory.path
        committed = find_commit(config, is_run=directory.is_run) if resume == "auto" else None
        if committed is not None and found is not None and committed.step <= step:
            committed = None
        checkpoint, meta = (None, None) if found is None else (found[0], found[1].meta)
        is_own = checkpoint is not None and checkpoint.resolve().parent == directory.checkpoints.resolve()
        own = checkpoint if is_own else None
        run = prepare(config, checkpoint, meta, committed, measure=measure, counts=counts, show=_log.info)
        directory.begin(config, None if run.planned is None else planned_run(run.planned, run.num_steps))
        is_done = False
        with recorded(run, directory), way_back(run, directory):
            try:
                with _stop_flag() as stop:
                    final = _train_until_done(run, directory, stop, own if step == run.step else None)
                partial = directory.path / ".hf-partial"
                export_model(final, directory.model, partial, card=model_card(directory.path))
                is_done = True
            finally:
                run.engine.close(removes=is_done)
    _log.info("done: %d steps, %s tokens; the model is in %s", run.step, f"{run.tokens:,}", directory.model)
    return directory.path


def _train_until_done(run: Run, directory: RunDirectory, stop: threading.Event, saved: Path | None) -> Path:
    """Take the steps that are left and save; `saved` is this run's checkpoint of the step that it is at.

    Returns:
        The checkpoint of the last step.
    """
    settings = run.config
    every = settings.checkpoint.every
    first_step = run.step
    progress = Progress(num_steps=run.num_steps, first_step=first_step, mode=settings.log.progress)
    run.care.begin()
    with MetricsLog(directory.metrics, resume_step=first_step) as metrics, progress:
        while run.step < run.num_steps and not stop.is_set():
            row = train_step(run)
            saved = None
            if row.step % settings.log.every == 0 or row.step == run.num_steps or row.skipped:
                metrics.write(row)
                progress.update(row)
            if row.skipped:
                run.tell("skipped", reason="the gradient was not finite")
            if run.skipped_in_a_row >= settings.optim.max_skipped_steps:
                raise DivergedError(
                    f"the gradient norm was not finite for {run.skipped_in_a_row} steps in a row, up to "
                    f"step {run.step}; nothing was updated in them. Lower optim.lr, or resume from an "
                    "earlier checkpoint"
                )
            if settings.memory.commit_every is not None and row.step % settings.memory.commit_every == 0:
                run.commit()
            if every is not None and row.step % every == 0:
                saved = _save(run, directory)
    if saved is None:
        saved = _save(run, directory)
    if stop.is_set() and run.step < run.num_steps:
        run.tell("stop", reason="a signal")
        _log.warning(
            "stopped by a signal after step %d, which is saved; the same command goes on from there", run.step
        )
        sys.exit(EXIT_STOPPED)
    return saved


def _save(run: Run, directory: RunDirectory) -> Path:
    path = save(
        directory.checkpoints,
        step=run.step,
        write=run.write,
        meta=run.meta(),
        keep_last=run.config.checkpoint.keep_last or sys.maxsize,
    )
    run.tell("checkpoint")
    return path


def _find_checkpoint(directory: RunDirectory, resume: str) -> tuple[Path, Manifest] | None:
    """Find where to go on from: the path and the manifest, or None to begin.

    Raises:
        CheckpointError: The named checkpoint is damaged, or none of the run's is whole.
        OutputError: `no`, and the directory holds a run.
    """
    if resume == "no":
        if directory.is_run:
            raise OutputError(
                f"{directory.path} holds a run already; give a new directory with --out, or use --resume auto"
            )
        return None
    if resume == "auto":
        return newest_whole(directory.checkpoints, warn=_log.warning)
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint directory; give one of checkpoints/step-*")
    later = [other for other in find(directory.checkpoints) if other.name > path.name]
    if later and path.absolute().parent == directory.checkpoints.absolute():
        raise CheckpointError(
            f"{directory.path} has gone on to {later[0].name}, so it cannot go back to {path.name}; "
            "give another directory with --out, or remove the later checkpoints"
        )
    return path, verify(path)


def _is_finished(directory: RunDirectory, config: Config, newest: Manifest) -> bool:
    """Say whether the run has taken its steps, and `hf/` holds the model of the last one, byte for byte."""
    num_steps = config.train.steps
    is_last = bool(newest.meta.get("is_last")) if num_steps is None else newest.step >= num_steps
    with os_errors("read", directory.model):
        if not is_last or not directory.model.exists():
            return False
        if is_exported(newest, directory.model):
            return True
    _log.warning("%s is not the model of step %d; it is written anew", directory.model, newest.step)
    return False


@contextmanager
def _stop_flag() -> Iterator[threading.Event]:
    """Let the first SIGINT or SIGTERM finish the step; a second one ends the process as it always does."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, _: FrameType | None) -> None:
        stop.set()
        signal.signal(number, previous[signal.Signals(number)])
        _log.warning("%s: finishing the step, then saving", signal.Signals(number).name)

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, previous[number])
