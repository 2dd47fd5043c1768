"""Threads that run kernels which release the GIL.

A pool of our own rather than Numba's `prange`: its default threading layer is not safe when two threads call
at once, and the others bring a library that must be installed or does not survive a fork. Results never
depend on which thread ran what.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

TASKS_PER_THREAD = 4
"""Tasks to cut a job into, per thread: a slow core then delays the job by a quarter of its share at most."""


class WorkerPool:
    """A fixed number of threads, the caller being one of them, that take tasks from a shared queue."""

    def __init__(self, num_threads: int | None = None) -> None:
        """Start the threads.

        Args:
            num_threads: Threads that work on one `run`, the calling thread included. None:
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
            tasks: Calls that do their work without the GIL. Cut a job into about `TASKS_PER_THREAD` per
                thread.

        Returns:
            What each task returned, in the order of `tasks`.

        Raises:
            BaseException: The first one that a task raised, after every running task has ended (so no thread
                still writes to the caller's buffers); tasks not yet begun are dropped.
        """
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
    """The tasks of one `run`, and what has become of them."""

    def __init__(self, tasks: Sequence[Callable[[], T]]) -> None:
        self._tasks = list(tasks)
        self._results: list[T | None] = [None] * len(self._tasks)
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
            if self._next == len(self._tasks):
                if self._num_running == 0:
                    self._done.set()
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
                self._next = len(self._tasks)
            if self._next == len(self._tasks) and self._num_running == 0:
                self._done.set()


@functools.cache
def default_pool() -> WorkerPool:
    """Return the pool that everything shares unless told otherwise, made on the first call."""
    return WorkerPool()


def worker_threads() -> int:
    """Return how many threads can work at once here: physical cores, within the affinity mask and CPU quota.

    `OMP_NUM_THREADS` is ignored: `torchrun` sets it to 1 for reasons that do not concern these threads.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    quota = _cgroup_cpus(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    cores = _physical_cores(cpus, Path("/sys/devices/system/cpu"))
    return max(1, cores if quota is None else min(cores, int(quota)))


def _physical_cores(cpus: set[int], root: Path) -> int:
    """Count cores among `cpus`: threads of one core share the memory pipes that the kernels wait for."""
    siblings = set()
    for cpu in cpus:
        try:
            siblings.add((root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:  # not Linux, or hidden by the container: count each CPU
            siblings.add(str(cpu))
    return len(siblings)


def _cgroup_cpus(membership: Path, root: Path) -> float | None:
    """Return the tightest CPU quota of the control groups (versions 1 and 2), in CPUs; None if free."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders = [root, root / "unified"]
        elif "cpu" in controllers.split(","):
            folders = [root / "cpu", root / controllers]
        else:
            continue
        for folder in folders:
            # A container may not see its own path under the mount: its parents, the mount itself included,
            # bind too.
            group = folder / path.lstrip("/")
            while True:
                quotas.append(_quota(group))
                if group == folder:
                    break
                group = group.parent
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if limit != "max" and int(limit) > 0 else None
    except (OSError, ValueError):
        return None
