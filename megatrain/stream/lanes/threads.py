"""Lanes that are threads: what emulated lanes and those of accelerators have in common.

Every wait is for an operation that was enqueued before, and a lane runs its operations in the order in which
they were enqueued, so lanes cannot wait for each other in a circle.

A failure: the first exception of any lane is carried to the launching thread, which raises it at its next
call. An operation that was enqueued before that and has not begun never runs: an update must not use
gradients that did not arrive. Events are set all the same, so nobody waits for ever.

The interpreter's end: lanes that are still open finish what they were given, and their threads end. A thread
that is cut off inside of torch would abort the process, with a step's updates half done.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # registers the end of its pools, which must come after ours
import logging
import queue
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeAlias

import torch

from megatrain.plan.program.kinds import Lane
from megatrain.stream.lanes.base import Event, Lanes, OrderingError
from megatrain.stream.lanes.records import Cause, Recorder

_Task: TypeAlias = tuple[Callable[[], None], int, bool]
"""One thing for a thread to do, its epoch, and whether it is work, which is left out after a failure."""


class Failure:
    """The first exception of a lane, on its way to the launching thread.

    An epoch ends when the launching thread raises. Work belongs to the epoch in which it was enqueued.
    """

    def __init__(self) -> None:
        """Start without one."""
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        """The one that nobody was told."""
        self._failed_epoch = -1
        self.epoch = 0

    def carry(self, error: BaseException, epoch: int) -> None:
        """Keep `error`, unless work of the same epoch failed before: later errors follow from the first."""
        with self._lock:
            if epoch > self._failed_epoch:
                self._failed_epoch = epoch
                self.error = error

    def has_struck(self, epoch: int) -> bool:
        """Whether work of an epoch has failed."""
        return epoch <= self._failed_epoch

    def take(self) -> BaseException | None:
        """Return the error that nobody was told, and begin a new epoch if there is one."""
        if self.error is None:
            return None
        with self._lock:
            error, self.error = self.error, None
            self.epoch += 1
        return error


class Worker(ABC):
    """The thread of one lane. Public methods are for the launching thread and return at once.

    It refers to nothing that refers to the lanes: lanes that were dropped and not closed end their threads.
    """

    def __init__(self, lane: Lane, failure: Failure, recorder: Recorder) -> None:
        """Prepare the thread; `start` starts it."""
        self.lane = lane
        self._failure = failure
        self._recorder = recorder
        self._batch: list[_Task] = []
        self._batches: queue.SimpleQueue[list[_Task]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"lane-{lane.value}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait(self, event: Event, cause: Cause) -> None:
        """Hold up what comes after until `event`."""
        self._batch.append((partial(self._wait, event, cause), self._failure.epoch, False))

    def submit(self, function: Callable[[], object], work: float, label: object, enqueued_s: float) -> None:
        """Run a function that was enqueued at some time, unless an operation fails before."""
        run = partial(self._run, function, work, label, enqueued_s)
        self._batch.append((run, self._failure.epoch, True))

    def record(self, event: Event) -> None:
        """Set `event` after what came before."""
        self._batch.append((partial(self._set, event), self._failure.epoch, False))
        self._hand_over()

    def mark(self) -> threading.Event:
        """Return an event that is set when the thread has got through what came before."""
        mark = threading.Event()
        self._batch.append((mark.set, self._failure.epoch, False))
        self._hand_over()
        return mark

    def end(self) -> None:
        """Let the thread end after what came before."""
        self._hand_over()
        self._batches.put([])

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _hand_over(self) -> None:
        if self._batch:  # an operation with its waits: the thread is woken once, and not for each
            self._batches.put(self._batch)
            self._batch = []

    def _serve(self) -> None:
        # Grad mode, current device and current stream are a thread's own, not those of the launching one.
        with torch.no_grad(), self._context():
            while batch := self._batches.get():
                for run, epoch, is_work in batch:
                    if not is_work or not self._failure.has_struck(epoch):
                        try:
                            run()
                        except BaseException as error:  # raised in the launching thread
                            self._failure.carry(error, epoch)
                del batch, run  # an idle lane must not keep the last operation's tensors alive

    def _context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _until_launched(self, event: Event, cause: Cause) -> None:
        assert event.launched is not None
        if not event.launched.is_set():
            start_s = time.perf_counter()
            event.launched.wait()
            self._recorder.waited(cause, start_s)

    @abstractmethod
    def _wait(self, event: Event, cause: Cause) -> None: ...

    def _run(self, function: Callable[[], object], work: float, label: object, enqueued_s: float) -> None:
        start_s = time.perf_counter()
        function()
        self._recorder.span(self.lane, label, start_s, time.perf_counter(), work)

    def _set(self, event: Event) -> None:
        assert event.launched is not None
        event.launched.set()


_log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 5e-4

_LAUNCHED = threading.Event()
"""Of all events of the launching thread: nobody waits until it has launched what it has launched."""
_LAUNCHED.set()

_OPEN: weakref.WeakSet[ThreadedLanes] = weakref.WeakSet()


def _at_end(end: Callable[[ThreadedLanes], object]) -> None:
    for lanes in list(_OPEN):
        try:
            end(lanes)
        except BaseException as error:  # the process ends with the code that it had
            _log.error("what ran in the background when the program ended has failed: %r", error)


class ThreadedLanes(Lanes):
    """Lanes of which some are threads; the others are the launching thread."""

    def __init__(self, device: torch.device, device_limit: int | None = None) -> None:
        """Start without threads: a lane's begins with its first operation."""
        super().__init__(device, device_limit)
        self._failure = Failure()
        self._workers: dict[Lane, Worker] = {}
        self._is_closed = False
        # Threads take the interpreter's lock for each task; beside a launching thread that never waits, each
        # would wait for a whole interval: with the default of 5 ms, updates take twice as long.
        self._interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._interval_s, _SWITCH_INTERVAL_S))
        weakref.finalize(self, _end, self._workers).atexit = False  # `_at_end` does
        _OPEN.add(self)

    def drain(self) -> None:
        """Block until every lane has done what was enqueued so far."""
        for lane, mark in [(lane, worker.mark()) for lane, worker in self._workers.items()]:
            start_s = time.perf_counter()
            mark.wait()
            self._recorder.waited(Cause(Lane.CALLER, lane, "everything"), start_s)
        try:
            self._finish()
        finally:  # the first failure explains the device's own
            self._raise_failure()

    def close(self) -> None:
        """Let the lanes finish, and end their threads."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.drain()
        finally:
            _end(self._workers)
            for worker in self._workers.values():
                worker.join()
            self._workers.clear()
            sys.setswitchinterval(self._interval_s)
            self._release()

    def _finish(self) -> None:
        """Wait for what the threads have launched."""

    def _release(self) -> None:
        """Give back what the lanes hold, after their threads have ended."""

    @abstractmethod
    def _make_worker(self, lane: Lane) -> Worker: ...

    def _is_threaded(self, lane: Lane) -> bool:
        return lane is not Lane.COMPUTE and lane is not Lane.CALLER

    def _worker(self, lane: Lane) -> Worker:
        worker = self._workers.get(lane)
        if worker is None:
            assert not self._is_closed, "the lanes are closed"
            worker = self._workers[lane] = self._make_worker(lane)
            worker.start()
        return worker

    def _raise_failure(self) -> None:
        if self._failure.error is None:
            return
        error = self._failure.take()
        if error is not None:
            self._tell(error)
            raise error

    def _come_to_rest(self) -> None:
        for mark in [worker.mark() for worker in self._workers.values()]:
            mark.wait()

    def _submit(self, lane: Lane, function: Callable[[], object], work: float, label: object) -> None:
        if self._is_threaded(lane):
            self._worker(lane).submit(function, work, label, self._launch_s())
        else:
            self._run_now(lane, function, work, label)

    def _launch_s(self) -> float:
        """Return the launching thread's time."""
        return time.perf_counter()

    def _record(self, lane: Lane) -> Event:
        if self._is_threaded(lane):
            event = Event(lane, is_recorded=True, launched=threading.Event())
            self._worker(lane).record(event)
        else:
            event = Event(lane, is_recorded=True, launched=_LAUNCHED)
            self._set_now(event)
        return event

    def _set_now(self, event: Event) -> None:
        """Complete an event of the launching thread, which has launched what comes before it."""
        event.done_s = time.perf_counter()

    def _wait(self, lane: Lane, event: Event, cause: Cause) -> None:
        if not event.is_recorded:
            raise OrderingError(f"{cause} waits for an event that is not recorded")
        if not self._is_threaded(lane):
            self._wait_now(event, cause)
        elif not event.is_done:
            self._worker(lane).wait(event, cause)

    def _wait_now(self, event: Event, cause: Cause) -> None:
        assert event.launched is not None
        if not event.launched.is_set():
            start_s = time.perf_counter()
            event.launched.wait()
            self._recorder.waited(cause, start_s)
        self._raise_failure()  # what was waited for may be what failed


def _end(workers: dict[Lane, Worker]) -> None:
    for worker in workers.values():
        worker.end()


atexit.register(_at_end, ThreadedLanes.close)
# Before atexit's functions, Python ends the pools of `concurrent.futures`, without which state on drives
# cannot be updated. What is registered last is called first, and theirs is registered by the import.
_register_before_pools: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
_register_before_pools(_at_end, ThreadedLanes.drain)
