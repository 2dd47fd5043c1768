from pathlib import Path

import pytest

from megatrain.optim import threads
from megatrain.optim.threads import ThreadBudget, update_threads, worker_threads


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
    assert threads._cgroup_cpus(tmp_path / "membership", tmp_path / "root") == cpus


def make_system(root: Path, num_cores: int, *, threads_per_core: int = 2, num_nodes: int = 1) -> set[int]:
    """Write a machine: CPU c is thread c // num_cores of core c % num_cores; nodes have cores in ranges."""
    for cpu in range(num_cores * threads_per_core):
        siblings = ",".join(str(cpu % num_cores + num_cores * k) for k in range(threads_per_core))
        write(root / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list", siblings + "\n")
    share = num_cores // num_nodes
    for node in range(num_nodes):
        ranges = [
            f"{first}-{first + share - 1}"
            for first in (node * share + num_cores * k for k in range(threads_per_core))
        ]
        write(root / "node" / f"node{node}" / "cpulist", ",".join(ranges) + "\n")
    write(root / "node" / f"node{num_nodes}" / "cpulist", "\n")  # memory without CPUs
    write(root / "node" / "online", f"0-{num_nodes}\n")
    return set(range(num_cores * threads_per_core))


@pytest.mark.parametrize(
    ("num_cores", "quota", "num_threads"),
    [
        *((1, None, 1), (2, None, 2), (3, None, 2), (4, None, 3), (7, None, 6), (8, None, 6), (16, None, 14)),
        *((16, 8.0, 6), (16, 7.9, 6), (16, 2.5, 2), (16, 1.5, 1), (16, 0.5, 1), (4, 64.0, 3)),
    ],
)
def test_cores_are_left_for_the_launcher_and_the_loader(
    tmp_path: Path, num_cores: int, quota: float | None, num_threads: int
) -> None:
    cpus = make_system(tmp_path, num_cores)
    budget = threads._budget(None, cpus, quota, tmp_path)
    assert (budget.num_threads, budget.cores, budget.quota_cpus) == (num_threads, num_cores, quota)


def test_a_bound_process_has_its_node_s_cores(tmp_path: Path) -> None:
    every = make_system(tmp_path, 32, num_nodes=2)
    assert threads._budget(None, every, None, tmp_path).num_nodes == 2
    first_node = {*range(16), *range(32, 48)}
    bound = threads._budget(None, first_node, None, tmp_path)
    assert (bound.num_threads, bound.cores, bound.num_nodes) == (14, 16, 1)
    assert threads._budget(None, first_node | {16}, None, tmp_path).num_nodes == 2


def test_a_machine_that_hides_itself_has_one_node(tmp_path: Path) -> None:
    budget = threads._budget(None, {0, 1, 2}, None, tmp_path)
    assert (budget.num_threads, budget.cores, budget.num_nodes) == (2, 3, 1)


def test_threads_that_were_set_are_kept(tmp_path: Path) -> None:
    cpus = make_system(tmp_path, 4)
    budget = threads._budget(9, cpus, None, tmp_path)
    assert budget.num_threads == 9
    assert "9 for updates of 4 physical cores (as set)" in budget.describe()


@pytest.mark.parametrize(
    ("num_cores", "num_nodes", "quota", "line"),
    [
        (
            *(16, 1, None),
            "threads: 14 for updates of 16 physical cores (2 for the launcher and the loader), 1 NUMA node, "
            "cgroup quota none",
        ),
        (
            *(64, 2, 3.5),
            "threads: 2 for updates of 64 physical cores (1 for the launcher and the loader), 2 NUMA nodes, "
            "cgroup quota 3.5 CPUs",
        ),
        (
            *(1, 1, None),
            "threads: 1 for updates of 1 physical core (none for the launcher and the loader), 1 NUMA node, "
            "cgroup quota none",
        ),
    ],
)
def test_line_for_the_log(
    tmp_path: Path, num_cores: int, num_nodes: int, quota: float | None, line: str
) -> None:
    cpus = make_system(tmp_path, num_cores, num_nodes=num_nodes)
    assert threads._budget(None, cpus, quota, tmp_path).describe() == line


def test_this_machine_has_a_budget() -> None:
    budget = update_threads()
    assert isinstance(budget, ThreadBudget)
    assert 1 <= budget.num_threads <= worker_threads() <= budget.cores
    assert update_threads(5).num_threads == 5
