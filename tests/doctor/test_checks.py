"""Every check, on trees of files of machines that have what it looks for; each finding has a fix."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain.doctor.checks import (
    Check,
    Level,
    check_disk,
    check_huge_pages,
    check_lockable,
    check_memory,
    check_nodes,
    check_shm,
    check_swap,
    check_threads,
)
from megatrain.doctor.disk import BlockDevice, block_device
from megatrain.doctor.software import check_device, check_sensor, check_versions
from megatrain.hardware.health import open_sensor
from megatrain.hardware.this_machine import Node
from megatrain.optim.threads import ThreadBudget
from tests.hardware.nvml import PROPERTIES, FakeNvml

GIB = 1 << 30
NVME = BlockDevice(
    name="nvme1n1",
    file_system="ext4",
    model="Samsung 990",
    is_rotational=False,
    written_bytes=5 * 10**9,
    life_used=None,
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def memory_tree(root: Path, *, available_gib: int, swap_gib: int = 0, limit_gib: int | None = None) -> Path:
    lines = {
        "MemTotal": 64,
        "MemAvailable": available_gib,
        "SwapTotal": swap_gib,
        "SwapFree": swap_gib // 2,
    }
    write(root / "proc/meminfo", "".join(f"{key}: {gib * 2**20} kB\n" for key, gib in lines.items()))
    if limit_gib is not None:
        write(root / "proc/self/cgroup", "0::/docker/4f\n")
        write(root / "sys/fs/cgroup/docker/4f/memory.max", f"{limit_gib * GIB}\n")
        write(root / "sys/fs/cgroup/docker/4f/memory.current", "0\n")
    return root


def test_memory_that_may_be_taken_is_fine(tmp_path: Path) -> None:
    check = check_memory(memory_tree(tmp_path, available_gib=60))
    assert (check.level, check.fix) == (Level.OK, "")
    assert check.text == "60.0 GiB may be taken now; the machine has 64.0 GiB"


def test_memory_that_a_control_group_withholds_is_warned_of(tmp_path: Path) -> None:
    check = check_memory(memory_tree(tmp_path, available_gib=60, limit_gib=16))
    assert check.level is Level.WARN
    assert check.text.startswith("16.0 GiB may be taken now; the machine has 64.0 GiB; a control group")
    assert "--memory" in check.fix
    assert "docker/4f" not in check.text, "a path may name a user"


def test_memory_that_others_hold_is_warned_of(tmp_path: Path) -> None:
    check = check_memory(memory_tree(tmp_path, available_gib=20))
    assert check.level is Level.WARN
    assert "other processes hold the rest" in check.text


def test_swap_is_warned_of_where_it_is_on(tmp_path: Path) -> None:
    assert check_swap(memory_tree(tmp_path, available_gib=60)).text == "off"
    check = check_swap(memory_tree(tmp_path, available_gib=60, swap_gib=8))
    assert (check.level, check.text) == (Level.WARN, "8.0 GiB on, 4.0 GiB in use")
    assert "swapoff" in check.fix


@pytest.mark.parametrize(
    ("on_gpu", "limit", "level"),
    [
        (True, resource.RLIM_INFINITY, Level.OK),
        (False, 8 << 20, Level.OK),
        (True, 8 << 20, Level.WARN),
    ],
)
def test_lockable_memory_matters_for_a_gpu(on_gpu: bool, limit: int, level: Level) -> None:
    check = check_lockable(on_gpu, limit)
    assert check.level is level
    assert bool(check.fix) == (level is Level.WARN)


@pytest.mark.parametrize(
    ("text", "level"),
    [("always [madvise] never\n", Level.OK), ("always madvise [never]\n", Level.WARN), (None, Level.OK)],
)
def test_huge_pages(tmp_path: Path, text: str | None, level: Level) -> None:
    if text is not None:
        write(tmp_path / "sys/kernel/mm/transparent_hugepage/enabled", text)
    assert check_huge_pages(tmp_path).level is level


@pytest.mark.parametrize(("shared", "has_none"), [("never", True), ("deny", True), ("advise", False)])
def test_huge_pages_of_memory_that_ranks_share(tmp_path: Path, shared: str, has_none: bool) -> None:
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    write(folder / "enabled", "always [madvise] never")
    write(folder / "shmem_enabled", f"always within_size [{shared}] force")
    told = "transparent, madvise; none for what several ranks share: echo advise | sudo tee /sys/kernel/mm/"
    assert check_huge_pages(tmp_path).text.startswith(told) == has_none


def test_process_on_several_nodes_is_told_where_its_device_is() -> None:
    nodes = [
        Node(number=number, nbytes=64 * GIB, cpus=frozenset({2 * number, 2 * number + 1}), kind="dram")
        for number in range(2)
    ]
    everywhere = frozenset(range(4))
    check = check_nodes(nodes, everywhere, 1)
    assert check.level is Level.WARN
    assert "--cpunodebind=1 --membind=1" in check.fix
    assert check_nodes(nodes, frozenset({2, 3}), 1).level is Level.OK
    assert check_nodes(nodes, everywhere).level is Level.OK
    assert check_nodes(nodes, everywhere, -1).level is Level.OK, "the system does not tell"
    assert check_nodes(nodes[:1], everywhere, 0).text == "1"


@pytest.mark.parametrize(
    ("omp", "level"), [(None, Level.OK), ("1", Level.WARN), ("8", Level.OK), ("4,2", Level.OK)]
)
def test_few_threads_of_torch_are_warned_of(omp: str | None, level: Level) -> None:
    budget = ThreadBudget(num_threads=6, cores=8, quota_cpus=None, num_nodes=1, reason="2 left over")
    check = check_threads(budget, omp)
    assert check.level is level
    assert check.text.startswith("6 for updates of 8 physical cores (2 left over)")
    assert check_threads(replace(budget, cores=1), "1").level is Level.OK


def test_shared_memory_of_this_machine_or_none(tmp_path: Path) -> None:
    assert check_shm(tmp_path).text.startswith("none here")
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert check_shm(tmp_path).level is Level.OK, "as large as the drive of the tests"


@pytest.mark.parametrize(("free", "level"), [(10**8, Level.FAIL), (10**10, Level.WARN), (10**12, Level.OK)])
def test_room_for_checkpoints(tmp_path: Path, free: int, level: Level) -> None:
    room, kind, wear = check_disk(tmp_path / "runs", NVME, free)
    assert (room.level, bool(room.fix)) == (level, level is not Level.OK)
    assert room.text == f"ext4 on nvme1n1 (Samsung 990), to be made in {tmp_path}; {free / 1e9:,.1f} GB free"
    assert (kind.text, kind.level) == ("NVMe", Level.OK)
    assert wear.text.startswith("5.0 GB written since start-up; endurance is not told")


def test_directory_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    room = check_disk(tmp_path, NVME, 10**12)[0]
    assert room.level is Level.FAIL
    assert "cannot be written" in room.text


@pytest.mark.parametrize(
    ("drive", "part"),
    [
        (replace(NVME, file_system="tmpfs", name="tmpfs", is_rotational=None), "in host memory"),
        (replace(NVME, file_system="nfs4", name="nfs4", is_rotational=None), "not local"),
        (replace(NVME, name="sda", is_rotational=True), "a turning disk"),
    ],
)
def test_what_is_no_local_drive_is_warned_of(tmp_path: Path, drive: BlockDevice, part: str) -> None:
    check = check_disk(tmp_path, drive, 10**12)[1]
    assert check.level is Level.WARN
    assert part in check.text
    assert check.fix


@pytest.mark.parametrize(("life", "level"), [(0.3, Level.OK), (0.9, Level.WARN)])
def test_worn_drive_is_warned_of(tmp_path: Path, life: float, level: Level) -> None:
    check = check_disk(tmp_path, replace(NVME, life_used=life), 10**12)[2]
    assert check.level is level
    assert f"{life:.0%} of its" in check.text


def drive_tree(root: Path) -> Path:
    disk = root / "sys/devices/pci0/nvme/nvme1n1"
    write(disk / "queue/rotational", "0\n")
    write(disk / "device/model", "Samsung 990  \n")
    write(disk / "stat", " 10 2 800 5 20 3 1600 9 0 7 7\n")
    write(disk / "nvme1n1p2/partition", "2\n")
    mapping = root / "sys/devices/virtual/block/dm-0"
    (mapping / "slaves").mkdir(parents=True)
    (mapping / "slaves/nvme1n1p2").symlink_to(disk / "nvme1n1p2")
    links = root / "sys/dev/block"
    links.mkdir(parents=True)
    (links / "259:1").symlink_to(disk)
    (links / "259:3").symlink_to(disk / "nvme1n1p2")
    (links / "253:0").symlink_to(mapping)
    write(
        root / "proc/self/mountinfo",
        "21 1 0:5 / /dev rw - devtmpfs devtmpfs rw\n36 35 259:3 / /data rw,noatime shared:1 - xfs /dev/x rw\n"
        "37 35 0:44 / /tmp rw - tmpfs tmpfs rw\n",
    )
    return root


@pytest.mark.parametrize("number", [(259, 1), (259, 3), (253, 0)])
def test_drive_below_a_disk_a_partition_and_a_mapping_is_found(
    tmp_path: Path, number: tuple[int, int]
) -> None:
    found = block_device(tmp_path, drive_tree(tmp_path), number)
    assert (found.name, found.model, found.is_rotational) == ("nvme1n1", "Samsung 990", False)
    assert found.written_bytes == 1600 * 512
    assert found.file_system == ("xfs" if number == (259, 3) else "unknown")
    assert found.life_used is None


def test_directory_without_a_drive_has_the_name_of_its_file_system(tmp_path: Path) -> None:
    found = block_device(tmp_path, drive_tree(tmp_path), (0, 44))
    assert (found.name, found.file_system, found.is_rotational) == ("tmpfs", "tmpfs", None)


def test_life_is_the_worse_of_both_estimates(tmp_path: Path) -> None:
    root = drive_tree(tmp_path)
    write(root / "sys/devices/pci0/nvme/nvme1n1/device/life_time", "0x02 0x09\n")
    assert block_device(tmp_path, root, (259, 1)).life_used == 0.9


def test_drive_of_a_directory_that_is_not_there_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    assert block_device(tmp_path / "a" / "b").name == block_device(tmp_path).name


def test_versions_are_compared_with_those_wanted() -> None:
    found = {"python": "3.11.7", "torch": "2.10.1+cu130", "transformers": "5.17.0"}
    check = check_versions(found, ["torch>=2.11", "transformers>=5.17", "ruff>=99; extra == 'dev'"])
    assert check.level is Level.FAIL
    assert check.fix == "pip install 'torch>=2.11'"
    assert check_versions({**found, "torch": "2.11.0"}, ["torch>=2.11"]).level is Level.OK
    assert check_versions({**found, "torch": "none"}, ["torch>=2.11"]).level is Level.FAIL
    assert check_versions().level is Level.OK


def test_cpu_is_warned_of_and_a_hidden_gpu_fails(tmp_path: Path) -> None:
    assert check_device(torch.device("cpu"), tmp_path).level is Level.WARN
    write(tmp_path / "proc/driver/nvidia/version", "NVRM version: 575\n")
    check = check_device(torch.device("cpu"), tmp_path)
    assert check.level is Level.FAIL
    assert "torch build with CUDA" in check.fix


def health(**answers: object) -> list[Check]:
    return check_sensor(open_sensor(PROPERTIES, FakeNvml(**answers)))


def test_healthy_device_is_described() -> None:
    found, ecc = health()
    assert (found.level, found.text) == (Level.OK, "driver 575.1, 300 of 350 W, 61 C")
    assert (ecc.level, ecc.text) == (Level.OK, "ECC is on, 7 corrected")


@pytest.mark.parametrize(
    ("answers", "index", "level", "part"),
    [
        ({"CurrentClocksEventReasons": 0x48}, 0, Level.WARN, "slowed down: hardware thermal slowdown"),
        ({"CurrentClocksEventReasons": 0x4}, 0, Level.OK, "61 C"),
        ({"uncorrected": 2}, 1, Level.FAIL, "2 that ECC could not correct"),
        ({"EccMode": (0, 0)}, 1, Level.WARN, "ECC is off"),
        ({"EccMode": None}, 1, Level.OK, "no ECC"),
    ],
)
def test_unhealthy_device_is_found(answers: dict[str, object], index: int, level: Level, part: str) -> None:
    check = health(**answers)[index]
    assert check.level is level
    assert part in check.text
    assert bool(check.fix) == (level is not Level.OK)


def test_device_without_a_driver_is_warned_of() -> None:
    (check,) = check_sensor(None)
    assert check.level is Level.WARN
    assert "nvidia-ml-py" in check.fix
