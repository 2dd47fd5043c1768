import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.optim import pool as pool_module
from megatrain.optim.pool import WorkerPool, default_pool, worker_threads


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
    assert len(set(pool.run([lambda: barrier.wait(10)] * 3))) == 3
    pool.close()


def test_error_is_raised_once_no_task_runs() -> None:
    pool = WorkerPool(2)
    started = threading.Event()
    ended = []

    def slow() -> None:
        started.set()
        time.sleep(0.05)
        ended.append(True)

    def fails() -> None:
        started.wait(10)
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
        thread.join(30)
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
    deadline = time.monotonic() + 5
    while watch() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert watch() is None
    pool.close()


def test_default_pool_is_one() -> None:
    assert default_pool() is default_pool()
    assert default_pool().num_threads == worker_threads() >= 1


def test_omp_num_threads_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = worker_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert worker_threads() == before


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "cpus"),
    [
        (
            "0::/a/b",
            {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "cpu.max": "max 100000"},
            2.5,
        ),
        ("0::/a", {"a/cpu.max": "max 100000"}, None),
        ("0::/hidden", {"cpu.max": "150000 100000"}, 1.5),
        ("3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, 3.0),
        ("3:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("3:memory:/x", {"memory/x/cpu.cfs_quota_us": "1", "memory/x/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, membership: str, files: dict[str, str], cpus: float | None) -> None:
    write(tmp_path / "membership", membership + "\n")
    for name, text in files.items():
        write(tmp_path / "root" / name, text + "\n")
    assert pool_module._cgroup_cpus(tmp_path / "membership", tmp_path / "root") == cpus


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu in range(4):
        write(tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}\n")
    assert pool_module._physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert pool_module._physical_cores({0, 2}, tmp_path) == 1
    assert pool_module._physical_cores({8, 9}, tmp_path) == 2
