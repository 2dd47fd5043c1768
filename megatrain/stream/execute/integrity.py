"""Whether the state is that of whole steps; once it is torn, nothing goes on from it.

A step changes the state block by block: updates, what they write back to drives, and copies home of what was
updated on the device. All of them must be done, or none: a model of which some parameters have had an update
that others have not is no step's. So the changes of a step are counted, and when something fails in the
middle, every later use of the state raises what has failed first. What fails before a step's first change
costs that step and nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatrain.errors import ModelError, TornStateError

_WAY_OUT = (
    "so the state is torn: some parameters have had an update that others have not. Nothing more is trained, "
    "saved or read from it; load the newest checkpoint (after `megatrain train`: start the same command "
    "again) and go on from there"
)


class _Changes:
    """The changes of one step, or of a copy that stands for itself."""

    def __init__(self) -> None:
        self.num_issued = self.num_begun = self.num_done = 0
        self.is_issued = False
        """There are no more to come."""
        self.number = 0
        """Which step of all it is, from 1 on; 0: of no step, or not issued."""

    @property
    def are_done(self) -> bool:
        return self.is_issued and self.num_done == self.num_issued

    @property
    def are_torn(self) -> bool:
        """Whether, with all lanes at rest, some of them are done or half done and others are not."""
        return self.num_begun > 0 and not self.are_done


class Integrity:
    """Counts the changes of the state. The launching thread calls it; changes run where they run."""

    def __init__(self) -> None:
        """Begin with a whole state."""
        self._lock = threading.Lock()
        self._changes: deque[_Changes] = deque()
        """What may not be done yet, in the order of steps."""
        self._open: _Changes | None = None
        """Of the step whose changes are being issued."""
        self.cause: BaseException | None = None
        """What has torn the state; None: it is whole."""
        self.has_failed = False
        """An operation of a lane has failed, and what was going on then is not dropped yet."""
        self.num_issued = 0
        """The steps whose changes were all issued."""
        self._first_lost: int | None = None
        """The first of them of which a failure has left no change done."""

    @property
    def num_held(self) -> int:
        """The steps that a whole state holds, of `num_issued`, once nothing is going on."""
        return self.num_issued if self._first_lost is None else self._first_lost - 1

    @property
    def is_changing(self) -> bool:
        """Whether a step has begun to change the state and is not at its end."""
        return self._open is not None and self._open.num_issued > 0

    def check(self) -> None:
        """Refuse to use a torn state.

        Raises:
            TornStateError: The state is torn; the error names what has failed first.
        """
        if self.cause is not None:
            raise TornStateError.after(self.cause, _WAY_OUT) from self.cause

    def condemn(self, error: BaseException) -> None:
        """Let nothing go on from this state, though every change of it may be done."""
        if self.cause is None:
            self.cause = error

    def stop(self) -> int | None:
        """Let no change begin any more, for ever, and return the steps that the state holds, of `num_issued`.

        For another thread than the launching one, which hangs, as a lane or the device does. None: the state
        is torn, or a change is half done.
        """
        self._lock.acquire()
        changes = list(self._changes)
        if self.cause is not None or any(each.are_torn for each in changes):
            return None
        lost = [each.number for each in changes if each.number and not each.are_done]
        return min([self.num_held, *(number - 1 for number in lost)])

    # -- changes --------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let the changes that are issued inside be the last ones of the step."""
        if self._open is None:
            self._open = self._new()
        try:
            yield
        except BaseException as error:
            self.drop(error)
            raise
        if self._open is not None:
            self.num_issued += 1
            self._open.is_issued, self._open.number = True, self.num_issued
            self._open = None

    def change(self, function: Callable[[], object]) -> Callable[[], None]:
        """Return `function`, counted as a change of the step that is going on."""
        if self._open is None:
            self._open = self._new()
        changes = self._open
        changes.num_issued += 1

        def run() -> None:
            with self._lock:
                changes.num_begun += 1
            function()
            with self._lock:
                changes.num_done += 1

        return run

    def copy_home(self, function: Callable[[], object]) -> Callable[[], None]:
        """Return `function`, without which what is home is torn from now on."""
        changes = self._new()
        changes.is_issued, changes.num_issued, changes.num_begun = True, 1, 1

        def run() -> None:
            function()
            changes.num_done = 1

        return run

    def _new(self) -> _Changes:
        while self._changes and self._changes[0].are_done:
            self._changes.popleft()
        self._changes.append(_Changes())
        return self._changes[-1]

    # -- failures -------------------------------------------------------------------------------------------

    @contextmanager
    def judging(self, error: BaseException) -> Iterator[None]:
        """Find out what a failure of a lane has left; inside, all lanes come to rest."""
        self.has_failed = True
        if self.cause is not None:
            yield
            return
        self.cause = error  # until the opposite is known, should this be interrupted
        yield
        if not any(changes.are_torn for changes in self._changes):
            self.cause = None
            lost = [each.number for each in self._changes if each.number and not each.are_done]
            if lost and self._first_lost is None:
                self._first_lost = lost[0]
            self._changes.clear()
            self._open = None

    def drop(self, error: BaseException | None = None) -> None:
        """Take note that the step will not be finished: a loss only if it has changed the state.

        Args:
            error: Why; None: it was the caller's, who has seen it.
        """
        self.has_failed = False
        if self.is_changing and self.cause is None:
            self.cause = error or ModelError(
                "a backward ended in an error after blocks had been updated (updates=immediate)"
            )
        self._open = None
