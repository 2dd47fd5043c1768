"""The checkpoints of a run: begun between two steps, and told when they are whole."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from megatrain.checkpoint.background import ChunkWriter
from megatrain.checkpoint.save import LeftOverError, RoomMadeError, save
from megatrain.checkpoint.saver import Saver, Wanted
from megatrain.checkpoint.uncopied import Uncopied
from megatrain.distributed.cells import shared_cells
from megatrain.errors import HardwareError, MegatrainError, OutputError, first_line
from megatrain.model.adapters.adapt import has_adapters
from megatrain.plan.cost.saved_bytes import checkpoint_bytes
from megatrain.train.adapters import base_of
from megatrain.train.evaluate.best_tracker import Best
from megatrain.train.planning.save_interval import SaveInterval, is_behind, wear_interval
from megatrain.train.planning.space import rated_bytes
from megatrain.train.records.directory import MovedError, RunDirectory
from megatrain.train.resume.state import lend_away, lend_state
from megatrain.train.run import Run
from megatrain.train.saves.contents import Contents
from megatrain.train.saves.nodes import NodeSaves, is_shared

_log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Seconds that a checkpoint may still take once the run is interrupted."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A checkpoint that is being written."""

    step: int
    tokens: int
    best: Best | None
    """The evaluation of this step, if it was the best one."""
    began_s: float
    stopped_s: float = 0.0
    """Seconds for which the run stopped when it was begun."""


def _save_of(step: int) -> str:
    return f"the save of step {step}"


def _wear_interval(run: Run) -> float:
    """Return the seconds between checkpoints of `auto` with which the drives of a run last; 0: not known."""
    if (planned := run.planned) is None:
        return 0.0
    return wear_interval(
        planned.plan,
        nbytes=checkpoint_bytes(planned.request.anatomy, planned.request.optimizer),
        num_steps=run.num_steps - run.step,
        rated_bytes=rated_bytes(run.config, planned.request),
        written_bytes=run.health.written_bytes() or 0,
    )


class _GivenUpError(Exception):
    """The run ends, and what is being written is not wanted."""


class Saves:
    """Saves a run, in the background where its settings say so. Use as a context manager.

    A save that fails is told, and the run goes on: the state is whole, and the next save may find room. Only
    the last one must succeed.

    Of several ranks, all call every method. The first one of each node writes, of the memory that those of
    the node share, and the others wait before they change what it has not copied. Several nodes that do not
    share the run's directory stop for a save, which the first rank writes.
    """

    def __init__(self, run: Run, directory: RunDirectory, newest: Path | None = None) -> None:
        """Take what saving takes, before the first step.

        Args:
            run: The run.
            directory: Its directory.
            newest: The checkpoint of its current step, if there is one.
        """
        self._run, self._directory = run, directory
        self._newest = None if newest is None else (run.step, newest)
        self._begun: _Begun | None = None
        self._best = run.evaluator.best_tracker.best
        """The best evaluation whose checkpoint is whole."""
        self._saver: Saver | None = None
        settings = run.config.checkpoint
        self._interval = SaveInterval(settings.every, run.loader.steps_per_epoch, wear_s=_wear_interval(run))
        ranks, host = run.ranks, run.engine.host
        self._is_background = is_behind(run.config)
        if self._is_background and host.is_parted:
            self._is_background = is_shared(directory.checkpoints, ranks)
        self._uncopied: Uncopied | None = None
        if self._is_background and ranks.local_size > 1:
            num_blocks = len(host.layouts)
            cells = shared_cells(ranks, num_blocks + ranks.local_size)
            self._uncopied = Uncopied(cells, num_blocks, ranks.local_rank, ranks.watch.look)
        self._contents: Contents | None = None
        self._writer: ChunkWriter | None = None
        if self._is_background and ranks.local_rank == 0:
            self._contents = self._make_contents(ranks.num_nodes, ranks.node)
            left = host.bytes_left // 2  # of what the plan leaves
            self._writer = ChunkWriter(min(settings.buffer, left), self._contents.files, self._uncopied)
        if self._writer is not None and ranks.rank == 0:
            self._saver = Saver(directory.checkpoints, self._writer)
        self._nodes: NodeSaves | None = None
        if self._is_background and host.is_parted:
            self._nodes = NodeSaves(ranks, self._writer)

    def _make_contents(self, num_nodes: int = 1, node: int = 0) -> Contents:
        run = self._run
        is_adapter = has_adapters(run.engine.model)
        base = base_of(run.config) if is_adapter else None
        of = {"num_nodes": num_nodes, "node": node}
        return Contents(run.engine, run.tokenizer, base=base, processor=run.processor, **of)

    def __enter__(self) -> Saves:
        guard = self._run.engine.arrangement.guard
        if self._writer is not None:
            guard.hold(self._writer.before_change)
        elif self._uncopied is not None:
            guard.hold(self._uncopied.wait)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish what was begun; on an interrupt only if that takes less than `GRACE_S`.

        What is begun when a value is found to have changed by itself is given up: it may hold that value.
        Of several ranks that end in an error, the first one does this by itself.
        """
        guard = self._run.engine.arrangement.guard
        if self._saver is None:
            try:
                if error is None:
                    self._finish()
            finally:
                self._give_up()
                if self._writer is not None:
                    self._writer.close()
                guard.hold(None)
            return
        try:
            if self._begun is not None:
                is_interrupt = isinstance(error, KeyboardInterrupt) and not self._saver.ends_within(GRACE_S)
                is_changed = isinstance(self._run.engine.arrangement.integrity.cause, HardwareError)
                if error is not None and (is_interrupt or is_changed):
                    self._saver.writer.fail(_GivenUpError())
                with self._run.ranks.watch.finishing(lambda: self.num_left):
                    self._finish(error)
        except Exception as failed:
            if error is None:
                raise
            _log.warning("finishing the checkpoint that was being written failed too: %s", failed)
        except BaseException as interrupt:
            self._saver.writer.fail(interrupt)
            raise
        finally:
            self._give_up()
            if self._begun is None and self._saver.is_saving:  # interrupted before that was noted
                self._saver.writer.fail(_GivenUpError())
            self._saver.close()
            guard.hold(None)

    def is_due(self) -> bool:
        """Return whether the newest step is to be saved; all ranks call it."""
        is_due = self._interval.is_due(self._run.step)
        return bool(self._run.ranks.tell(is_due)) if self._interval.is_timed else is_due

    def begin(self) -> None:
        """Save the newest step; in the background, this returns when what is not in RAM has been copied.

        All ranks call it between two steps.

        Raises:
            MovedError: The run's directory is another one now, and the state is saved there.
        """
        if not self._is_background:
            self._save_now()
            return
        self._finish()
        run = self._run
        is_in_place, unseen = True, ""
        if run.ranks.rank == 0:
            try:
                is_in_place = self._directory.is_in_place()
            except OutputError as error_of_look:
                unseen = str(error_of_look)
        is_in_place, unseen = run.ranks.tell((is_in_place, unseen))
        if unseen:
            self._failed(self._start(), OutputError(unseen))
            return
        if not is_in_place:  # it is saved where it is now, or anew, and the run ends
            failed = self._save_now()
            if failed is not None:
                raise failed
            return
        begun = self._start()
        meta = run.meta()  # waits for updates in the background
        error: OutputError | None = None
        with run.moving(f"reading step {run.step} for its checkpoint"):
            if self._saver is not None:
                error = self._begin(self._saver, meta)
            elif self._nodes is not None:
                order = run.engine.arrangement.guard.order
                error = self._nodes.begin(self._directory.checkpoints, self._contents, order)
            if run.ranks.size > 1:  # others lend all, and a disk may have been full before all was read
                lend_away(run.engine, but=() if self._contents is None else self._contents.read)
        # not inside `moving`: whoever waits here moves, and would keep one for ever that waits elsewhere
        reasons = run.ranks.gather_values(None if error is None else str(error), "orders")
        reason = next((each for each in reasons if each is not None), None)
        if reason is None:
            self._begun = replace(begun, stopped_s=time.monotonic() - begun.began_s)
            return
        if self._nodes is not None:
            self._nodes.settle(reason)
        if self._saver is not None and self._saver.is_saving:  # another node has failed
            try:
                self._saver.result()
            except OutputError as told:  # it may say what went to make room
                error = told
        self._failed(begun, error or OutputError(reason))

    def tell(self) -> None:
        """Tell of a checkpoint that has become whole since, or could not be written."""
        if self._begun is None or not (self._nodes is None or self._nodes.are_settled()):
            return
        if self._run.ranks.tell(self._saver is not None and self._saver.is_done):
            self._finish()

    def last(self) -> Path:
        """Save the newest step if that is not done, and return its checkpoint once it is whole.

        Raises:
            OutputError: It cannot be written.
        """
        self._finish()
        if self._is_background and not self._is_saved:
            self.begin()
            self._finish()
        if not self._is_saved:
            error = self._save_now()
            if isinstance(error, RoomMadeError):
                error = self._save_now()
            if error is not None:
                raise error
        assert self._newest is not None
        return self._newest[1]

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """The threads that write checkpoints in the background, until this is over."""
        return () if self._saver is None else self._saver.threads

    @property
    def num_left(self) -> int:
        """The chunks of a checkpoint that are still to be written in the background; any thread may ask."""
        return 0 if self._writer is None else self._writer.num_left

    def writes_at_rest(self) -> Callable[[Path], None] | None:
        """Return what writes a checkpoint of the state in RAM, which does not change; None: not all is here.

        For another thread than that of the run, which hangs. A checkpoint that is under way is waited for
        first, and nobody is told of it.
        """
        if self._run.engine.host.is_parted:
            return None
        if self._saver is None or self._contents is None:
            contents = self._make_contents()
            writer = ChunkWriter(0, contents.files)
        else:
            contents, writer = self._contents, self._saver.writer
            if self._saver.is_saving:
                with suppress(Exception):
                    self._saver.result()
        return None if contents.away else partial(contents.write, writer=writer)

    # -- inside ---------------------------------------------------------------------------------------------

    @property
    def _is_saved(self) -> bool:
        return self._newest is not None and self._newest[0] == self._run.step

    @property
    def _keep_last(self) -> int:
        return self._run.config.checkpoint.keep_last or sys.maxsize

    @property
    def _keep_too(self) -> frozenset[int]:
        return frozenset(self._run.evaluator.kept_steps).union(self._run.last_good.kept)

    def _start(self) -> _Begun:
        run = self._run
        self._interval.begun()
        run.last_good.save(run.step, self._keep_last)
        best = run.evaluator.best_tracker.best
        is_best = best is not None and best.step == run.step
        return _Begun(run.step, run.tokens, best if is_best else None, time.monotonic())

    @property
    def _keep_until(self) -> frozenset[int]:
        """The steps that are kept until the next checkpoint is whole: the best one of before."""
        if self._best is None or not self._run.evaluator.kept_steps:
            return frozenset()
        return frozenset([self._best.step])

    def _save_now(self) -> OutputError | None:
        """Save the newest step, and return when it is on the disk, with what has kept it from that."""
        run = self._run
        begun = self._start()
        meta = run.meta()
        path, error = None, None
        read: set[int] = set()
        with run.moving(f"saving step {run.step}"), run.watched(_save_of(run.step), moves=True):
            if run.ranks.rank == 0:
                try:
                    with self._directory.found():
                        path = save(
                            self._directory.checkpoints,
                            step=run.step,
                            write=partial(run.write, read=read),
                            meta=meta,
                            keep_last=self._keep_last,
                            keep_too=self._keep_too,
                            keep_until=self._keep_until,
                        )
                except MovedError:
                    raise
                except LeftOverError as left:
                    path = left.path
                    _log.warning("%s", left)
                except OutputError as failed:
                    error = failed
                    if run.engine.host.is_read_by_all:  # the others lend all, and learn of it then
                        lend_state(run.engine, but=read)
            elif run.engine.host.is_read_by_all:
                lend_state(run.engine)
        has_room = isinstance(error, RoomMadeError)
        said = None if path is None else str(path), str(error), has_room
        # not inside `moving`: whoever waits here moves, and would keep one for ever that waits elsewhere
        saved, reason, has_room = run.ranks.tell(said)
        if saved is None:
            error = error or (RoomMadeError if has_room else OutputError)(reason)
            self._failed(begun, error)
            return error
        self._done(begun, Path(saved), time.monotonic() - begun.began_s)
        return None

    def _begin(self, saver: Saver, meta: dict[str, Any]) -> OutputError | None:
        """Begin to save the newest step, and return what has kept that from being begun."""
        run, contents, nodes = self._run, self._contents, self._nodes
        assert contents is not None
        wanted = Wanted(
            step=run.step,
            meta=meta,
            files=contents.files,
            write_rest=contents.take(),
            write_first=contents.write_tokenizer,
            keep_last=self._keep_last,
            keep_too=self._keep_too,
            keep_until=self._keep_until,
        )
        if run.ranks.size > 1:
            wanted = replace(wanted, passed=contents.lend)
        if nodes is not None:
            wanted = replace(wanted, others=nodes.for_first(), made=nodes.tell_place)
        failed = None
        try:
            with run.watched(_save_of(run.step), moves=True), self._directory.found():
                saver.begin(wanted, run.engine.arrangement.guard.order, contents.away)
        except MovedError:
            raise
        except OutputError as error:
            failed = error
        finally:
            contents.let_go()
        if nodes is not None:
            nodes.tell_place(None)
        return failed

    def _finish(self, end: BaseException | None = None) -> None:
        """Wait for what is being written, and tell of it.

        Args:
            end: The error that ends the run, after which other ranks do not come here; None: they do.
        """
        if self._begun is None:
            return
        begun, began_s = self._begun, time.monotonic()
        path: Path | None = None
        failed: BaseException | None = None
        if end is not None:
            self._give_up()
        elif self._nodes is not None:
            with self._run.watched(_save_of(begun.step)):
                self._nodes.wait()
        if self._saver is not None:
            why = "" if end is None else f" after an error ({first_line(end)})"
            with self._run.watched(f"{_save_of(begun.step)}{why}"):
                path, failed = self._result(self._saver)
        self._begun = None
        said: list[Any] = [
            None if path is None else str(path),
            str(failed),
            isinstance(failed, _GivenUpError),
        ]
        waited_s = 0.0 if self._writer is None else self._writer.waited_s
        if self._nodes is not None:
            waited_s = max(waited_s, self._nodes.waited_s)
        found, reason, is_given_up = said if end is not None else self._run.ranks.tell(said)
        if is_given_up:
            self._run.last_good.lose(begun.step)
            return
        if found is None:
            self._failed(begun, failed or OutputError(reason))
            return
        late_s = time.monotonic() - began_s  # the disk has not kept up with the run
        self._done(begun, Path(found), begun.stopped_s + waited_s + late_s, by_itself=end is not None)

    def _give_up(self) -> None:
        """Let go of what several nodes write and have not all written: they are not asked any more."""
        if self._nodes is not None:
            self._nodes.give_up(_GivenUpError())

    def _result(self, saver: Saver) -> tuple[Path | None, BaseException | None]:
        """Wait for what is being written; return its directory, or what has kept it from being whole."""
        try:
            return saver.result(), None
        except LeftOverError as left:
            _log.warning("%s", left)
            return left.path, None
        except (MegatrainError, _GivenUpError) as error:
            return None, error
        except BaseException:
            if not saver.is_saving:
                self._begun = None
            raise

    def _done(self, begun: _Begun, path: Path, waited_s: float, *, by_itself: bool = False) -> None:
        run = self._run
        self._newest = begun.step, path
        self._best = begun.best or self._best
        run.save_s = time.monotonic() - begun.began_s
        self._interval.took(waited_s)
        run.tell_of(begun.step, "checkpoint", seconds=round(run.save_s, 3), waited_s=round(waited_s, 3))
        if run.ranks.rank == 0:
            run.experts.write(self._directory.experts)
        if by_itself and run.ranks.size > 1:
            return  # callbacks of all ranks are called together
        if begun.best is not None:
            run.callbacks.best(run.evaluator.best_tracker.best_loss, begun.step, str(path))
        run.callbacks.at(begun.step, tokens=begun.tokens)
        run.callbacks.call("on_save")
        run.callbacks.at(run.step, tokens=run.tokens)

    def _failed(self, begun: _Begun, error: BaseException) -> None:
        run = self._run
        run.last_good.lose(begun.step)
        tracker = run.evaluator.best_tracker
        if begun.best is not None and begun.best == tracker.best and run.evaluator.kept_steps:
            tracker.go_back(self._best)
        run.tell_of(begun.step, "unsaved", reason=str(error))
        if run.ranks.rank == 0:
            _log.warning(
                "step %d is not saved: %s; the run goes on, and saves again at the next interval",
                begun.step,
                error,
            )
