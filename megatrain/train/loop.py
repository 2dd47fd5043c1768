"""The training loop, with everything around its steps and everything that follows from them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.config import Config
from megatrain.config.sizes import counted
from megatrain.distributed.alone import ALONE, Alone
from megatrain.train.beginning import Beginning
from megatrain.train.callbacks.named import trackers
from megatrain.train.caller import NOBODY, Caller
from megatrain.train.faults.recovery import check_divergence, resume_point_told
from megatrain.train.faults.rescue import rescued
from megatrain.train.faults.together import Ending, ending_of, late_ranks_ended, saved_together
from megatrain.train.faults.watching import begin_watch, end_watch
from megatrain.train.hang import hangs_ended
from megatrain.train.outputs.export import best_step, export_model, find_best
from megatrain.train.planning.plan_run import Planned
from megatrain.train.planning.space import require_space, space_of
from megatrain.train.planning.timeline import planned_run
from megatrain.train.ranks import node_named, require_checkpoint
from megatrain.train.records.directory import MovedError, RunDirectory
from megatrain.train.records.metrics import MetricsLog, StepMetrics
from megatrain.train.report.card import model_card
from megatrain.train.report.record import recorded
from megatrain.train.resume.point import ResumePoint, point_from_values
from megatrain.train.resume.state_commits import held_by_nodes
from megatrain.train.resume_point import choose_best_anew
from megatrain.train.run import Run, prepare
from megatrain.train.run_data import RunData
from megatrain.train.saves.saves import Saves
from megatrain.train.screen.progress import Progress
from megatrain.train.shutdown import end_early, refuse_failed_callback, stop_flag, what_follows
from megatrain.train.step import train_step

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
        callbacks: The callbacks, of transformers' Trainer, which are called after those of `log.to`. Every
            rank calls its own, and what those of the first one wish all do.
        caller: The folders that are kept between runs, and the functions that measure and show progress.
        ranks: The ranks that train together, of which this process is one; None for a single process.

    Returns:
        The run directory.

    Raises:
        MegatrainError: The subclass carries the exit code.
        SystemExit: 75, after a signal stopped the run and its state was saved.
    """
    directory, ranks = RunDirectory(Path(config.out)), ranks or ALONE
    is_first = ranks.rank == 0
    held = held_by_nodes(config, ranks)
    if is_first:
        directory.check()
    beginning = Beginning(config, directory, resume, held, ranks.size)
    own_trackers: list[TrainerCallback] = []

    def begin() -> tuple[Run, ResumePoint, bool] | None:
        start = ranks.tell(beginning.find() if is_first else None)
        if start is None:
            return None
        point = point_from_values(start["point"])
        reader = beginning.reader
        if is_first:
            own_trackers[:] = own_trackers or trackers(config.log.to, directory.path)
        elif point.checkpoint is not None:
            is_read_later = beginning.is_read_later_by_others
            reader = require_checkpoint(
                ranks, point.checkpoint, start["fingerprint"], is_read_later=is_read_later
            )
        parallel = config.parallel.model_copy(update={"shards": start["shards"]})
        with node_named(ranks), nullcontext() if reader is None else reader.damage_blamed():
            run = prepare(
                config.model_copy(update={"parallel": parallel}),
                point,
                caller if is_first else Caller(prepared=caller.prepared),
                references=caller.references(config),
                show=_log.info if is_first else _log.debug,
                check=partial(_check_space, done=0 if point.record is None else int(point.record["step"])),
                callbacks=[*own_trackers, *callbacks],
                ranks=ranks,
                reader=reader,
            )
        is_compared = reader is None or reader.is_done or not is_first  # others compare what they read
        assert is_compared, "something of the checkpoint was not compared"
        return run, point, start["is_own"]

    with directory.lock() if is_first else nullcontext():
        begun = beginning.tried(begin)
        if begun is None:
            return directory.path
        run, point, is_own = begun
        tracker = run.evaluator.best_tracker
        if is_first:
            caller.progress("")
            if point.checkpoint is not None and not is_own:
                choose_best_anew(tracker, point.checkpoint.parent)
            directory.begin(
                run.config, None if run.planned is None else planned_run(run.planned, run.num_steps)
            )
        tracker.restore(ranks.tell(tracker.state()))
        is_saved = is_own and point.saved is not None and point.saved["step"] == run.step
        is_done, ending = False, ending_of(ranks)
        together = None if ending is None else partial(saved_together, run, directory, ending)
        with recorded(run, directory), resume_point_told(run, directory), ExitStack() as signals:
            stop = signals.enter_context(stop_flag(ranks, partial(what_follows, run)))
            try:
                with rescued(run, directory, together):
                    saved = point.checkpoint if is_saved else None
                    final = _train_until_done(run, directory, stop, saved, ending)
                best = best_step({"evaluation": tracker.state()}, loads_best=config.eval.load_best)
                if is_first:
                    signals.close()  # an export may be interrupted
                    with directory.found():
                        final = directory.checkpoints / final.name
                        if best is not None:
                            final = find_best(directory.checkpoints, best)
                        unfinished = directory.path / ".hf-partial"
                        export_model(final, directory.model, unfinished, card=model_card(directory.path))
                # the first rank removes the state of its node, and ends in an error where the run goes on
                is_done = is_first or (ranks.node > 0 and (run.is_complete or tracker.has_stopped))
            except MovedError:
                is_done = True  # all is saved, and state on drives belongs to the directory's old name
                raise
            finally:
                run.engine.close(removes=is_done)
    if is_first:
        of = "" if best is None else f" of step {best:,}, the best one,"
        _log.info(
            "done: %s, %s; the model%s is in %s",
            counted(run.step, "step"),
            counted(run.tokens, "token"),
            of,
            directory.model,
        )
    return directory.path


def _check_space(planned: Planned, data: RunData, *, done: int) -> None:
    """Refuse a run whose directory has no room for its saves, or warn of too many that are kept.

    Raises:
        CapacityError: `require_space` raises it.
    """
    space = space_of(
        planned.config,
        planned.request,
        planned.plan,
        num_steps=data.num_steps,
        steps_per_epoch=data.steps_per_epoch,
        done=done,
    )
    if warning := require_space(space):
        _log.warning("%s", warning)


@contextmanager
def _shown(run: Run, directory: RunDirectory) -> Iterator[Callable[[StepMetrics, bool], None]]:
    """Yield what writes and shows a row, given whether it is the last one; the first rank does both.

    Inside, that rank also shows how far a step is that lasts.
    """
    if run.ranks.rank > 0:
        yield lambda row, is_last: None
        return
    progress = Progress(
        num_steps=run.num_steps,
        first_step=run.step,
        mode=run.config.log.progress,
        passed=run.engine.passed,
    )
    with MetricsLog(directory.metrics, resume_step=run.step) as metrics, progress:

        def show(row: StepMetrics, is_last: bool) -> None:
            with run.watched(f"the row of step {row.step} in {directory.metrics}", moves=True):
                metrics.write(row)
            progress.update(row, is_last=is_last)

        run.within = progress.within
        try:
            yield show
        finally:
            run.within = None


def _train_until_done(
    run: Run, directory: RunDirectory, stop: threading.Event, saved: Path | None, ending: Ending | None
) -> Path:
    """Take the remaining steps and save.

    Args:
        run: The run.
        directory: Its directory.
        stop: What a signal sets.
        saved: This run's checkpoint of its current step, if there is one.
        ending: What several ranks of a node need to end together.

    Returns:
        The checkpoint of the last step.

    Raises:
        SystemExit: The first rank raises it where the run is stopped before its last step, to go on later.
    """
    settings, callbacks, is_first = run.config, run.callbacks, run.ranks.rank == 0
    commit_every = settings.memory.commit_every
    run.health.begin()
    begin_watch(run)
    with ExitStack() as stack:
        show = stack.enter_context(_shown(run, directory))
        saves = Saves(run, directory, saved)  # has threads, which end where it does
        stack.enter_context(hangs_ended(run, directory, saves))
        stack.enter_context(late_ranks_ended(run, directory, saves, ending))
        stack.enter_context(saves)
        _begin(run)
        if saved is None and run.step in run.evaluator.kept_steps:
            saves.begin()  # the run was killed between its commit and its save
        reason = run.evaluator.stop() if run.evaluator.wants_stop else ""
        while not run.is_complete and not reason and callbacks.failure is None:
            if run.ranks.tell(stop.is_set()):
                reason = "a signal"
                break
            with nullcontext() if run.within is None else run.within.step(run.step + 1):
                row = train_step(run)
            saves.tell()
            callbacks.at(run.step, tokens=run.tokens)
            callbacks.call("on_step_end")
            is_last = run.is_complete or stop.is_set()
            if row.step % settings.log.every == 0 or is_last or row.skipped:
                show(row, is_last)
            if row.step % settings.log.every == 0 or callbacks.wants("should_log"):
                callbacks.log(row.logged)
            if is_first:
                check_divergence(run, row, directory)
            if run.is_complete:
                end_watch(run)
            ends_epoch = row.step % run.loader.steps_per_epoch == 0
            if ends_epoch:
                callbacks.call("on_epoch_end")
            is_best = False
            # a run that is to stop leaves its evaluation to the process that goes on from here
            is_due = run.evaluator.is_due(row.step)
            if is_due and not run.is_complete and run.ranks.tell(stop.is_set()):
                is_due = False
            if is_due or callbacks.wants("should_evaluate"):
                is_best = _evaluate(run)
            if run.evaluator.wants_stop:
                reason = run.evaluator.stop()
            elif callbacks.wants("should_training_stop"):
                reason = "a callback"
            if commit_every is not None and row.step % commit_every == 0:
                run.commit()
                callbacks.agree()  # a state that cannot be saved is a failure
            if saves.is_due() or (is_best and settings.eval.keep_best) or callbacks.wants("should_save"):
                saves.begin()
            if ends_epoch and not run.is_complete:
                callbacks.call("on_epoch_begin")
        if not run.is_complete:
            end_watch(run)
        saved = saves.last()
    callbacks.call("on_train_end")
    refuse_failed_callback(run, saved)
    if reason and not run.is_complete and is_first:
        run.tell("stop", reason=reason)
        end_early(run, reason)
    return saved


def _begin(run: Run) -> None:
    """Tell callbacks of the run, and evaluate before its first step if that is wanted."""
    run.callbacks.at(run.step, tokens=run.tokens)
    run.callbacks.call("on_train_begin")
    run.callbacks.call("on_epoch_begin")
    run.callbacks.saved_state()  # an unsavable state fails now and not at the first checkpoint
    run.callbacks.agree()
    refuse_failed_callback(run, None)
    if run.evaluator.is_due(run.step):
        _evaluate(run)


def _evaluate(run: Run) -> bool:
    """Evaluate and report the results; return whether the model is the best so far."""
    run.note_position()
    with run.moving(f"evaluating step {run.step}"), run.watched(f"the evaluation after step {run.step}"):
        outcome = run.evaluator.evaluate(run.engine, run.tokenizer, run.step, run.ranks)
    for one in outcome.evaluations:
        run.tell("evaluation", name=one.name, **one.numbers)
    for prompt, text in outcome.texts:
        run.tell("sample", prompt=prompt, text=text)
    tracker = run.evaluator.best_tracker
    if outcome.is_best:
        run.tell("best", name=tracker.best_set, loss=tracker.best_loss)
    if outcome.evaluations:
        run.callbacks.log(outcome.numbers)
        run.callbacks.call("on_evaluate", metrics=outcome.numbers)  # callbacks compare it with the best
        run.callbacks.best(tracker.best_loss, tracker.best_step, None)
    return outcome.is_best
