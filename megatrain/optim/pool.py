"""Threads that run kernels which release the GIL.

A pool of our own rather than Numba's `prange`: its default threading layer is not safe when two threads call
at once, and the others bring a library that must be installed or does not survive a fork. Results never
depend on which thread ran what.

Threads are not pinned to cores. Tasks are short and come from one queue, so a thread whose core is busy, or
far from the memory, takes fewer of them, and the scheduler may move it; a pinned one would wait behind the
launcher or the loader, whose cores nobody knows beforehand. Measured on two cores, free and pinned: 63 and
62 ms, and next to a busy process 129 and 124, 118 and 111 (medians of 40, within their spread). Where there
are several NUMA nodes, bind the process to one (`numactl`): the count in `threads` follows the mask.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from megatrain.optim.threads import update_threads, worker_threads

T = TypeVar("T")

TASKS_PER_THREAD = 4
"""Tasks to cut a job into, per thread: a slow core then delays the job by a quarter of its share at most."""


class WorkerPool:
    """A fixed number of threads, the caller being one of them, that take tasks from a shared queue."""

    def __init__(self, num_threads: int | None = None) -> None:
        """Start the threads.

        Args:
            num_threads: The number of threads that work on one `run`, the calling thread included; None:
                `worker_threads()`.
        """
        self.num_threads = worker_threads() if num_threads is None else num_threads
        assert self.num_threads >= 1, f"num_threads is {num_threads}"
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers = [
            threading.Thread(target=self._work, name=f"megatrain-worker-{index}", daemon=True)
            for index in range(1, self.num_threads)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run all tasks and wait for them; may be called from several threads, and from within a task.

        Args:
            tasks: The calls, which do their work without the GIL. Cut a job into about `TASKS_PER_THREAD` per
                thread.

        Returns:
            The results of the tasks, in the order of `tasks`.

        Raises:
            BaseException: A task raised it, as the first; every running task has ended by then (so no thread
                still writes to the caller's buffers); tasks not yet begun are dropped.
        """
        if len(tasks) <= 1:
            return [task() for task in tasks]
        job = _Job(tasks)
        for _ in range(min(len(self._workers), len(tasks) - 1)):
            self._jobs.put(job)
        job.work()
        return job.wait()

    def close(self) -> None:
        """End the threads. Only later calls of `run` may follow; they run on the calling thread alone."""
        for _ in self._workers:
            self._jobs.put(None)
        for worker in self._workers:
            worker.join()
        self._workers = []

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.work()
            del job  # an idle worker must not keep the last job's buffers alive


class _Job(Generic[T]):
    """The tasks of one `run`, with their results."""

    def __init__(self, tasks: Sequence[Callable[[], T]]) -> None:
        self._tasks = list(tasks)
        self._count = len(self._tasks)
        self._results: list[T | None] = [None] * self._count
        self._lock = threading.Lock()
        self._next = 0
        self._num_running = 0
        self._error: BaseException | None = None
        self._done = threading.Event()

    def work(self) -> None:
        """Take tasks until none is left."""
        while (index := self._begin()) is not None:
            error = None
            try:
                self._results[index] = self._tasks[index]()
            except BaseException as caught:  # handed to the caller of `run`, KeyboardInterrupt included
                error = caught
            self._end(error)

    def wait(self) -> list[T]:
        """Return the results once every task has ended."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._results  # type: ignore[return-value]

    def _begin(self) -> int | None:
        with self._lock:
            if self._next == self._count:
                if self._num_running == 0:
                    self._finish()
                return None
            index = self._next
            self._next += 1
            self._num_running += 1
            return index

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._num_running -= 1
            if error is not None:
                self._error = self._error or error
                self._next = self._count
            if self._next == self._count and self._num_running == 0:
                self._finish()

    def _finish(self) -> None:
        self._tasks.clear()  # a worker that has not let go of the job must not keep its buffers alive
        self._done.set()


_default_lock = threading.Lock()
_default_pool: WorkerPool | None = None


def default_pool() -> WorkerPool:
    """Return the pool that everything shares unless told otherwise, made on the first call.

    It has as many threads as `update_threads` finds.
    """
    global _default_pool
    with _default_lock:
        if _default_pool is None:
            _default_pool = WorkerPool(update_threads().num_threads)
        return _default_pool


@atexit.register  # registered before the lanes' own, so it is called after it
def _close_default() -> None:
    if _default_pool is not None:
        _default_pool.close()
