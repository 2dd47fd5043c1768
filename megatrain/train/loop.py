"""The training loop, with everything around its steps and everything that follows from them."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.checkpoint.format import fingerprint
from megatrain.checkpoint.save import save
from megatrain.config import Config
from megatrain.config.sizes import counted
from megatrain.config.types import steps_between
from megatrain.distributed.alone import ALONE, Alone
from megatrain.train.callbacks.named import trackers
from megatrain.train.caller import NOBODY, Caller
from megatrain.train.endings import end_early, refuse_failed_callback, stop_flag
from megatrain.train.going_on import choose_best_anew, find_checkpoint, is_finished, point_of
from megatrain.train.outputs.export import best_step, export_model, find_best
from megatrain.train.planning.timeline import planned_run
from megatrain.train.ranks import (
    COMMIT,
    END,
    EVALUATE,
    STEP,
    lend,
    read_alone,
    require_checkpoint,
    signals_ignored,
    step_of_all,
)
from megatrain.train.records.directory import RunDirectory
from megatrain.train.records.metrics import MetricsLog
from megatrain.train.report.card import model_card
from megatrain.train.report.record import recorded
from megatrain.train.resume.changes import changed_settings
from megatrain.train.resume.point import ResumePoint
from megatrain.train.resume.state_commits import held_by_nodes
from megatrain.train.run import Run, prepare
from megatrain.train.screen.progress import Progress
from megatrain.train.shards import with_shards
from megatrain.train.step import train_step
from megatrain.train.way_back import judge, way_back

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from megatrain.distributed.ranks import Ranks

_log = logging.getLogger(__name__)


def train(
    config: Config,
    *,
    resume: str = "auto",
    callbacks: Sequence[TrainerCallback] = (),
    caller: Caller = NOBODY,
    ranks: Ranks | Alone | None = None,
) -> Path:
    """Train or resume training, and leave the model in `hf/` of the run directory.

    Args:
        config: The complete and checked settings.
        resume: The wish: `auto`, `no`, or the path of a checkpoint.
        callbacks: The callbacks, of transformers' Trainer, which are called after those of `log.to`.
        caller: The folders that are kept between runs, and the functions that measure and show progress.
        ranks: The ranks that train together, of which this process is one; None for a single process.

    Returns:
        The run directory.

    Raises:
        MegatrainError: The subclass carries the exit code.
        SystemExit: 75, after a signal stopped the run and its state was saved.
    """
    directory, ranks = RunDirectory(Path(config.out)), ranks or ALONE
    held = held_by_nodes(config, ranks)
    if ranks.rank > 0:
        _follow(config, ranks, caller)
        return directory.path
    directory.check()
    with directory.lock():
        directory.remove_leftovers()
        found = find_checkpoint(directory, resume)
        step = 0 if found is None else found[1].step
        if found is not None and is_finished(directory, config, found[1]):
            _log.info("%s is finished (%s); nothing to do", directory.path, counted(step, "step"))
            changed = changed_settings(found[1].meta["config"], config)
            if changed:
                _log.warning(
                    "its settings differ (%s); give a new directory with --out to train with these",
                    "; ".join(changed),
                )
            ranks.tell(None)
            return directory.path
        point = point_of(config, directory, found, held if resume == "auto" else [])
        checkpoint = point.checkpoint
        is_own = checkpoint is not None and checkpoint.resolve().parent == directory.checkpoints.resolve()
        own = checkpoint if is_own else None
        config = with_shards(config, ranks.size, point.record)
        ranks.tell(
            {
                "checkpoint": None if checkpoint is None else str(checkpoint),
                "saved": point.saved,
                "fingerprint": None if found is None else fingerprint(found[1]),
                "committed": point.committed,
                "shards": config.parallel.shards,
            }
        )
        members = [*trackers(config.log.to, directory.path), *callbacks]
        run = prepare(
            config,
            point,
            caller,
            references=caller.references(config),
            show=_log.info,
            callbacks=members,
            ranks=ranks,
        )
        caller.progress("")
        read_alone(ranks, run.engine)
        if checkpoint is not None and not is_own:
            choose_best_anew(run.evaluator.standing, checkpoint.parent)
        directory.begin(run.config, None if run.planned is None else planned_run(run.planned, run.num_steps))
        is_done = False
        with recorded(run, directory), way_back(run, directory):
            try:
                ranks.meet("orders")  # from now on the other ranks leave signals to this one
                with stop_flag(is_alone=ranks.size == 1) as stop:
                    final = _train_until_done(run, directory, stop, own if step == run.step else None)
                standing = run.evaluator.standing.state()
                best = best_step({"evaluation": standing}, loads_best=config.eval.load_best)
                if best is not None:
                    final = find_best(directory.checkpoints, best)
                partial = directory.path / ".hf-partial"
                export_model(final, directory.model, partial, card=model_card(directory.path))
                is_done = True
            finally:
                run.engine.close(removes=is_done)
    of = "" if best is None else f" of step {best:,}, the best one,"
    _log.info(
        "done: %s, %s; the model%s is in %s",
        counted(run.step, "step"),
        counted(run.tokens, "token"),
        of,
        directory.model,
    )
    return directory.path


def _follow(config: Config, ranks: Ranks | Alone, caller: Caller) -> None:
    """Take the steps that the first rank orders."""
    found = ranks.tell()
    if found is None:
        return
    named, shards = (found.pop(name) for name in ("fingerprint", "shards"))
    checkpoint = None if found["checkpoint"] is None else Path(found["checkpoint"])
    if checkpoint is not None:
        require_checkpoint(ranks, checkpoint, named)
    parallel = config.parallel.model_copy(update={"shards": shards})
    run = prepare(
        config.model_copy(update={"parallel": parallel}),
        ResumePoint(**{**found, "checkpoint": checkpoint}),
        Caller(prepared=caller.prepared),
        references=caller.references(config),
        ranks=ranks,
    )
    with signals_ignored():
        ranks.meet("orders")
        is_done = False
        try:
            while (order := ranks.tell()) != END:
                if order == STEP:
                    train_step(run)
                elif order == COMMIT:
                    run.commit()
                elif order == EVALUATE:
                    with run.moving(f"evaluating step {run.step}"):
                        run.evaluator.losses(run.engine, ranks)
                else:
                    lend(run.engine, order)
            is_done = ranks.node > 0  # the first rank handles the first node's state
        finally:
            run.engine.close(removes=is_done)


def _train_until_done(run: Run, directory: RunDirectory, stop: threading.Event, saved: Path | None) -> Path:
    """Take the remaining steps and save; `saved` is this run's checkpoint of its current step, if any.

    Returns:
        The checkpoint of the last step.
    """
    settings, callbacks = run.config, run.callbacks
    every = steps_between(settings.checkpoint.every, run.loader.steps_per_epoch)
    commit_every = settings.memory.commit_every
    progress = Progress(num_steps=run.num_steps, first_step=run.step, mode=settings.log.progress)
    run.care.begin()
    with MetricsLog(directory.metrics, resume_step=run.step) as metrics, progress:
        _begin(run)
        if saved is None and run.step in run.evaluator.kept_steps:
            saved = _save(run, directory)  # the run was killed between its commit and its save
        reason = run.evaluator.stop() if run.evaluator.wants_stop else ""
        while run.step < run.num_steps and not reason and callbacks.failure is None:
            if stop.is_set():
                reason = "a signal"
                break
            with step_of_all(run.ranks, run.engine):
                row = train_step(run)
            saved = None
            callbacks.at(run.step, tokens=run.tokens)
            callbacks.call("on_step_end")
            is_last = row.step == run.num_steps or stop.is_set()
            if row.step % settings.log.every == 0 or is_last or row.skipped:
                metrics.write(row)
                progress.update(row, is_last=is_last)
            if row.step % settings.log.every == 0 or callbacks.wants("should_log"):
                callbacks.log(row.logged)
            judge(run, row, directory)
            ends_epoch = row.step % run.loader.steps_per_epoch == 0
            if ends_epoch:
                callbacks.call("on_epoch_end")
            is_best = False
            if run.evaluator.is_due(row.step) or callbacks.wants("should_evaluate"):
                is_best = _evaluate(run)
            if run.evaluator.wants_stop:
                reason = run.evaluator.stop()
            elif callbacks.wants("should_training_stop"):
                reason = "a callback"
            if commit_every is not None and row.step % commit_every == 0:
                run.ranks.tell(COMMIT)
                run.commit()
            is_time = every is not None and row.step % every == 0
            if is_time or (is_best and settings.eval.keep_best) or callbacks.wants("should_save"):
                saved = _save(run, directory)
            if ends_epoch and row.step < run.num_steps:
                callbacks.call("on_epoch_begin")
    if saved is None:
        saved = _save(run, directory)
    callbacks.call("on_train_end")
    run.ranks.tell(END)
    refuse_failed_callback(run, saved)
    if reason and run.step < run.num_steps:
        run.tell("stop", reason=reason)
        end_early(run, reason)
    return saved


def _begin(run: Run) -> None:
    """Tell callbacks of the run, and evaluate before its first step if that is wanted."""
    run.callbacks.at(run.step, tokens=run.tokens)
    run.callbacks.call("on_train_begin")
    run.callbacks.call("on_epoch_begin")
    run.callbacks.saved_state()  # an unsavable state fails now and not at the first checkpoint
    refuse_failed_callback(run, None)
    if run.evaluator.is_due(run.step):
        _evaluate(run)


def _evaluate(run: Run) -> bool:
    """Evaluate and report the results; return whether the model is the best so far."""
    with run.moving(f"evaluating step {run.step}"):
        run.ranks.tell(EVALUATE)
        outcome = run.evaluator.evaluate(run.engine, run.tokenizer, run.step, run.ranks)
    for one in outcome.evaluations:
        run.tell("evaluation", name=one.name, **one.numbers)
    for prompt, text in outcome.texts:
        run.tell("sample", prompt=prompt, text=text)
    standing = run.evaluator.standing
    if outcome.is_best:
        run.tell("best", name=standing.best_set, loss=standing.best_loss)
    if outcome.evaluations:
        run.callbacks.log(outcome.numbers)
        run.callbacks.call("on_evaluate", metrics=outcome.numbers)  # callbacks compare it with the best
        run.callbacks.best(standing.best_loss, standing.best_step, None)
    return outcome.is_best


def _save(run: Run, directory: RunDirectory) -> Path:
    keep_last = run.config.checkpoint.keep_last or sys.maxsize
    run.last_good.save(run.step, keep_last)
    meta = run.meta()  # other threads make the updates, which must be done
    with run.moving(f"saving step {run.step}"):
        path = save(
            directory.checkpoints,
            step=run.step,
            write=run.write,
            meta=meta,
            keep_last=keep_last,
            keep_too=run.evaluator.kept_steps.union(run.last_good.kept),
        )
    run.tell("checkpoint")
    if (standing := run.evaluator.standing).best_step == run.step:
        run.callbacks.best(standing.best_loss, run.step, str(path))
    run.callbacks.call("on_save")
    return path
