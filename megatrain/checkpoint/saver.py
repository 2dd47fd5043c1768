"""Save checkpoints in the background, to the bytes of `save.save`, while training goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.checkpoint.background import ChunkWriter
from megatrain.checkpoint.contents import LargeFile
from megatrain.checkpoint.format import FileEntry
from megatrain.checkpoint.save import begin, commit, let_go, removed_on_error, room_made
from megatrain.errors import os_errors


class OtherWriters:
    """What the thread of a save is told of the files that other processes write into the same directory.

    The thread of the run talks to these, asks whether the own files are written, and says how theirs are.
    """

    def __init__(self) -> None:
        """Begin with nothing written."""
        self.own: Future[None] = Future()
        """Ends when the own files are written, or have failed."""
        self.files: Future[Mapping[str, FileEntry]] = Future()
        """Ends when nobody writes there any more, with the entries of their files by name, or an error."""

    def together(self, wait: Callable[[], dict[str, FileEntry]]) -> dict[str, FileEntry]:
        """Return the entries of all files.

        Args:
            wait: The function that waits for the own files, and returns their entries.

        Raises:
            BaseException: What `wait` raises, or what `files` was given. Nobody writes any more.
        """
        try:
            known = wait()
        except BaseException as error:
            self.own.set_exception(error)
            futures.wait([self.files])
            raise
        self.own.set_result(None)
        return known | dict(self.files.result())


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a checkpoint is to be."""

    step: int
    """Optimizer steps that the state has been through."""
    files: Sequence[LargeFile]
    """The large files, whose tensors the blocks' state is."""
    write_rest: Callable[[Path], None]
    """Puts the other files, of values that do not change, into the directory that it is given."""
    write_first: Callable[[Path], None] = lambda directory: None
    """Puts there what may change soon, in the thread that begins the save."""
    meta: Mapping[str, Any]
    """Plain JSON values with string keys for the manifest."""
    keep_last: int
    """The number of steps to keep, 1 or more."""
    keep_too: Collection[int] = ()
    """Steps to keep beside these, however old."""
    keep_until: Collection[int] = ()
    """Steps to keep beside these until this one is whole."""
    others: OtherWriters | None = None
    """Other processes that write files of it; None: there are none."""
    passed: Callable[[int], object] = lambda block: None
    """As of `ChunkWriter.begin`."""
    made: Callable[[Path], object] = lambda directory: None
    """Is given the directory that the files go into, in the thread that begins the save."""

    @property
    def kept_until(self) -> frozenset[int]:
        """The steps to keep beside the last ones until this one is whole."""
        return frozenset((*self.keep_too, *self.keep_until))


class Saver:
    """Saves checkpoints in the background, one at a time; its thread, and those of `writer`, exist always."""

    def __init__(self, root: Path, writer: ChunkWriter) -> None:
        """Save in a directory of checkpoints, which is made if it is not there."""
        self._root, self.writer = root, writer
        self._saved: Future[Path] | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="megatrain-saver", daemon=True)
        self._thread.start()

    def begin(self, wanted: Wanted, order: Sequence[int], apart: Collection[int] = ()) -> None:
        """Begin to save; from now on `writer.before_change` guards the state that is saved.

        Args:
            wanted: The checkpoint.
            order: The blocks in the order in which they will change.
            apart: The blocks that this thread reads, before it returns.

        Raises:
            RoomMadeError: As of `save`.
            OutputError: Nothing can be written; no earlier checkpoint has changed.
        """
        assert self._saved is None, "the last checkpoint was not asked for"
        with room_made(self._root, wanted.step, wanted.keep_last, wanted.kept_until):
            temporary = begin(self._root, wanted.step)
            with removed_on_error(temporary):
                wanted.made(temporary)
                with os_errors("write the checkpoint", temporary):
                    wanted.write_first(temporary)
                self.writer.begin(temporary, wanted.files, order, apart, wanted.passed)
        saved: Future[Path] = Future()
        self._jobs.put(partial(self._finish, temporary, wanted, saved))
        self._saved = saved  # after it is to be done: an interrupt between the two leaves nobody waiting

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """Its thread, and those of `writer`."""
        return (self._thread, *self.writer.threads)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint was begun whose end `result` has not told."""
        return self._saved is not None

    @property
    def is_done(self) -> bool:
        """Whether `result` would return at once."""
        return self._saved is not None and self._saved.done()

    def ends_within(self, seconds: float) -> bool:
        """Wait some seconds; return whether `result` would return at once then."""
        assert self._saved is not None
        return bool(futures.wait([self._saved], timeout=seconds).done)

    def result(self) -> Path:
        """Wait for the checkpoint; return its directory.

        Raises:
            OutputError: It could not be written; see `save`.
            KeyboardInterrupt: The wait is interrupted, and `is_saving` still; or `writer.fail` was given it.
        """
        assert self._saved is not None
        futures.wait([self._saved])  # where this is interrupted, it is still being saved
        saved, self._saved = self._saved, None
        return saved.result()

    def close(self) -> None:
        """End all threads once what was begun is done."""
        self._jobs.put(None)
        self._thread.join()
        self.writer.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def _finish(self, temporary: Path, wanted: Wanted, saved: Future[Path]) -> None:
        try:
            keeps = wanted.keep_last, wanted.kept_until
            with room_made(self._root, wanted.step, *keeps), removed_on_error(temporary):
                try:
                    with os_errors("write the checkpoint", temporary):
                        wanted.write_rest(temporary)
                except BaseException as error:
                    self.writer.fail(error)
                wait = self.writer.wait
                known = wait() if wanted.others is None else wanted.others.together(wait)
                path = commit(temporary, step=wanted.step, meta=wanted.meta, known=known)
            let_go(path, wanted.keep_last, wanted.keep_too)
        except BaseException as error:  # raised where the result is asked for
            saved.set_exception(error)
        else:
            saved.set_result(path)
