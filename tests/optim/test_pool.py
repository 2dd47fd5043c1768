import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from megatrain.optim import pool as pool_module
from megatrain.optim.pool import WorkerPool, default_pool
from megatrain.optim.threads import update_threads


def returns(value: int) -> Callable[[], int]:
    def task() -> int:
        time.sleep(0.0005 * (value % 3))
        return value

    return task


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_results_come_in_order(num_threads: int) -> None:
    pool = WorkerPool(num_threads)
    assert pool.run([returns(value) for value in range(50)]) == list(range(50))
    assert pool.run([]) == []
    assert pool.run([returns(3)]) == [3]
    pool.close()


def test_threads_work_at_the_same_time() -> None:
    pool = WorkerPool(3)
    barrier = threading.Barrier(3)
    assert len(set(pool.run([lambda: barrier.wait()] * 3))) == 3
    pool.close()


def test_error_is_raised_once_no_task_runs() -> None:
    pool = WorkerPool(2)
    started, failed = threading.Event(), threading.Event()
    ended = []

    def slow() -> None:
        started.set()
        failed.wait()
        ended.append(True)

    def fails() -> None:
        started.wait()
        threading.Timer(0.01, failed.set).start()  # the other task goes on after this one has failed
        raise ValueError("from a task")

    with pytest.raises(ValueError, match="from a task"):
        pool.run([slow, fails])
    assert ended == [True]
    assert pool.run([returns(1), returns(2)]) == [1, 2]
    pool.close()


def test_tasks_after_an_error_are_dropped() -> None:
    ran = []

    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WorkerPool(1).run([fails, lambda: ran.append(True)])
    assert ran == []


def test_run_from_many_threads_and_from_a_task() -> None:
    pool = WorkerPool(2)
    results: dict[int, list[int]] = {}

    def nested() -> int:
        return sum(pool.run([returns(value) for value in range(4)]))

    def caller(index: int) -> None:
        results[index] = pool.run([nested] * 4)

    threads = [threading.Thread(target=caller, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: [6] * 4 for index in range(4)}
    pool.close()


def test_closed_pool_still_works_on_the_caller() -> None:
    pool = WorkerPool(3)
    pool.close()
    assert pool.run([returns(value) for value in range(5)]) == list(range(5))


def test_idle_workers_keep_nothing_alive() -> None:
    import gc
    import weakref

    class Buffer:
        pass

    buffer = Buffer()
    watch = weakref.ref(buffer)
    pool = WorkerPool(2)
    pool.run([lambda kept=buffer: None] * 8)  # type: ignore[misc]
    del buffer
    while watch() is not None:  # each worker lets go of it a moment after its last task
        gc.collect()
        time.sleep(0.01)
    pool.close()


@pytest.fixture
def fresh_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has no default pool yet."""
    monkeypatch.setattr(pool_module, "_default_pool", None)
    yield
    if pool_module._default_pool is not None:
        pool_module._default_pool.close()


@pytest.mark.usefixtures("fresh_default")
def test_default_pool_is_one() -> None:
    pools = WorkerPool(4).run([default_pool] * 8)
    assert set(pools) == {default_pool()}
    assert default_pool().num_threads == update_threads().num_threads >= 1


def test_a_job_that_is_done_keeps_no_buffers() -> None:
    """Whoever still holds it: a worker may be held up before it lets go."""
    buffer = np.zeros(4)
    alive = weakref.ref(buffer)
    job: pool_module._Job[float] = pool_module._Job([partial(np.sum, buffer)])
    del buffer
    job.work()
    assert job.wait() == [0.0]
    assert alive() is None
