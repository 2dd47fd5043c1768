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
from typing import Any

from megatrain.checkpoint.files import fsync_directory, remove_tree, rename
from megatrain.checkpoint.load import find, newest_whole, verify
from megatrain.checkpoint.save import save
from megatrain.config import Config
from megatrain.errors import CheckpointError, DivergedError, OutputError
from megatrain.model.head import count_targets
from megatrain.stream.machine import Measure
from megatrain.train.directory import RunDirectory
from megatrain.train.metrics import MetricsLog, Progress, StepMetrics
from megatrain.train.planning.allocation import check_allocated
from megatrain.train.run import Run, changed_settings, prepare
from megatrain.train.state import write_model
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
        run.elastic.after_step(report)

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
        power_w=vitals.power_w,
        temperature_c=vitals.temperature_c,
        throttled=vitals.throttled,
        energy_j_per_token=None if vitals.energy_j is None else vitals.energy_j / max(1, num_tokens),
        ecc_errors=vitals.ecc_errors,
        swap_bytes=vitals.swap_bytes,
        drive_written_bytes=vitals.drive_written_bytes,
    )


def train(config: Config, *, resume: str = "auto", measure: Measure | None = None) -> Path:
    """Train, or go on training, and leave the model in `hf/` of the run directory.

    Args:
        config: Complete and checked.
        resume: `auto`, `no`, or the path of a checkpoint.
        measure: Returns this machine, for the plan; as in `machine_for`.

    Returns:
        The run directory.

    Raises:
        MegatrainError: Its subclasses carry the exit code.
        SystemExit: 75, after a signal stopped the run and its state was saved.
    """
    directory = RunDirectory(Path(config.out))
    directory.check()
    with directory.lock():
        found = _find_checkpoint(directory, resume)
        if found is not None and _is_finished(directory, config, found[1]):
            _log.info("%s is finished (%d steps); nothing to do", directory.path, found[1]["step"])
            changed = changed_settings(found[1]["config"], config)
            if changed:
                _log.warning(
                    "its settings differ (%s); give a new directory with --out to train with these",
                    "; ".join(changed),
                )
            return directory.path
        committed = find_commit(config, is_run=directory.is_run) if resume == "auto" else None
        if committed is not None and found is not None and committed.step <= int(found[1]["step"]):
            committed = None
        checkpoint, meta = found or (None, None)
        run = prepare(config, checkpoint, meta, committed, measure=measure, show=_log.info)
        directory.begin(config)
        is_done = False
        with way_back(run, directory):
            try:
                with _stop_flag() as stop:
                    _train_until_done(run, directory, stop, first_step=run.step)
                _export(run, directory)
                is_done = True
            finally:
                run.engine.close(removes=is_done)
    _log.info("done: %d steps, %s tokens; the model is in %s", run.step, f"{run.tokens:,}", directory.model)
    return directory.path


def _train_until_done(run: Run, directory: RunDirectory, stop: threading.Event, *, first_step: int) -> None:
    settings = run.config
    every = settings.checkpoint.every
    saved_step = first_step if first_step else -1
    progress = Progress(num_steps=run.num_steps, first_step=first_step, mode=settings.log.progress)
    run.care.begin()
    with MetricsLog(directory.metrics, resume_step=first_step) as metrics, progress:
        while run.step < run.num_steps and not stop.is_set():
            row = train_step(run)
            if row.step % settings.log.every == 0 or row.step == run.num_steps or row.skipped:
                metrics.write(row)
                progress.update(row)
            if run.skipped_in_a_row >= settings.optim.max_skipped_steps:
                raise DivergedError(
                    f"the gradient norm was not finite for {run.skipped_in_a_row} steps in a row, up to "
                    f"step {run.step}; nothing was updated in them. Lower optim.lr, or resume from an "
                    "earlier checkpoint"
                )
            if settings.memory.commit_every is not None and row.step % settings.memory.commit_every == 0:
                run.commit()
            if every is not None and row.step % every == 0:
                _save(run, directory)
                saved_step = row.step
    if run.step != saved_step:
        _save(run, directory)
    if stop.is_set() and run.step < run.num_steps:
        _log.warning(
            "stopped by a signal after step %d, which is saved; the same command goes on from there", run.step
        )
        sys.exit(EXIT_STOPPED)


def _save(run: Run, directory: RunDirectory) -> None:
    save(
        directory.checkpoints,
        step=run.step,
        write=run.write,
        meta=run.meta(),
        keep_last=run.config.checkpoint.keep_last or sys.maxsize,
    )


def _export(run: Run, directory: RunDirectory) -> None:
    """Write the final model beside its place and rename it there, so that `hf/` is whole or absent."""
    partial = directory.path / ".hf-partial"
    if partial.exists():
        remove_tree(partial, first="config.json")
    partial.mkdir()
    write_model(run.engine, run.tokenizer, partial)
    if directory.model.exists():
        remove_tree(directory.model, first="config.json")
    rename(partial, directory.model)
    fsync_directory(directory.path)


def _find_checkpoint(directory: RunDirectory, resume: str) -> tuple[Path, dict[str, Any]] | None:
    """Find where to go on from: the path and the manifest's meta, or None to begin.

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
        found = newest_whole(directory.checkpoints, warn=_log.warning)
        return None if found is None else (found[0], dict(found[1].meta))
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint directory; give one of checkpoints/step-*")
    later = [other for other in find(directory.checkpoints) if other.name > path.name]
    if later and path.absolute().parent == directory.checkpoints.absolute():
        raise CheckpointError(
            f"{directory.path} has gone on to {later[0].name}, so it cannot go back to {path.name}; "
            "give another directory with --out, or remove the later checkpoints"
        )
    return path, dict(verify(path).meta)


def _is_finished(directory: RunDirectory, config: Config, meta: dict[str, Any]) -> bool:
    if not (directory.model / "config.json").is_file():
        return False
    num_steps = config.train.steps
    if num_steps is None:
        return bool(meta.get("is_last"))
    return int(meta["step"]) >= num_steps


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
