"""The present machine: its nodes and limits from a tree of files, and rates kept for it and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.errors import ConfigError, OutputError
from megatrain.hardware import HardwareSpec
from megatrain.hardware.this_machine import (
    Device,
    DriveRates,
    Measurements,
    cpu_model,
    describe_machine,
    fingerprint,
    free_bytes,
    load_measured,
    memory_nodes,
    save_measured,
    total_bytes,
    with_present_capacities,
)

GIB_IN_KB = 1 << 20
MEASURED = Measurements(
    matmul_flops_per_s={"bf16": 4e12, "fp32": 1e12},
    attention_flops_per_s={"bf16": 2e12, "fp32": 5e11},
    device_bytes_per_s=3e12,
    h2d_bytes_per_s=5e10,
    d2h_bytes_per_s=4e10,
    both_share=0.75,
    pageable_share=0.25,
    node_bytes_per_s=(2e11, 1e11),
    update_params_per_s={1: 1e9, 2: 2e9},
    drive=DriveRates(read_bytes_per_s=6e9, write_bytes_per_s=3e9, is_direct=True, is_duplex=False),
)
GPU = Device(name="NVIDIA H100", nbytes=80_000_000_000, watts=700.0)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_tree(root: Path, *nodes: tuple[int, str], available_gib: int = 90, limit: int | None = None) -> Path:
    """Write what a machine of some nodes (GiB, CPUs) shows of itself."""
    total = sum(gib for gib, _ in nodes) or 96
    kb = f"MemTotal: {total * GIB_IN_KB} kB\nMemAvailable: {available_gib * GIB_IN_KB} kB\n"
    write(root / "proc/meminfo", kb)
    write(root / "proc/cpuinfo", "processor\t: 0\nmodel name\t: EPYC 9004\nprocessor\t: 1\n")
    for number, (gib, cpus) in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{number}"
        write(folder / "cpulist", f"{cpus}\n")
        write(
            folder / "meminfo",
            f"Node {number} MemTotal:  {gib * GIB_IN_KB} kB\nNode {number} MemFree: 5 kB\n",
        )
    if limit is not None:
        write(root / "proc/self/cgroup", "0::/box\n")
        write(root / "sys/fs/cgroup/box/memory.max", f"{limit}\n")
        write(root / "sys/fs/cgroup/box/memory.current", "0\n")
    return root


def machine_in(root: Path, path: Path | None = None) -> HardwareSpec:
    return describe_machine(MEASURED, device=GPU, num_cores=2, path=path, root=root)


def test_nodes_are_those_of_the_system(tmp_path: Path) -> None:
    first, second = memory_nodes(make_tree(tmp_path, (64, "0-1"), (32, "2-3")))
    assert (first.number, first.nbytes, first.cpus, first.kind) == (0, 64 << 30, {0, 1}, "dram")
    assert (second.number, second.nbytes, second.cpus) == (1, 32 << 30, {2, 3})


def test_system_without_nodes_is_one(tmp_path: Path) -> None:
    (node,) = memory_nodes(make_tree(tmp_path))
    assert (node.number, node.nbytes, node.kind) == (0, 96 << 30, "dram")


def test_memory_without_cores_is_cxl_only_where_there_is_cxl(tmp_path: Path) -> None:
    """GH200 shows the memory of its GPU as such a node: it is no host memory."""
    root = make_tree(tmp_path, (64, "0-1"), (512, ""))
    assert [node.number for node in memory_nodes(root)] == [0]
    (root / "sys/bus/cxl/devices/mem0").mkdir(parents=True)
    write(root / "sys/devices/system/node/node1/access0/initiators/read_bandwidth", "28000\n")
    assert [(node.kind, node.claimed_bytes_per_s) for node in memory_nodes(root)] == [
        ("dram", None),
        ("cxl", 2.8e10),
    ]


def test_machine_has_the_memory_that_may_be_taken(tmp_path: Path) -> None:
    root = make_tree(tmp_path, (64, "0-1"), (32, "2-3"), available_gib=90)
    spec = machine_in(root)
    assert spec.host_bytes == 90 << 30
    assert [node.bytes_per_s for node in spec.memory] == [2e11, 1e11]
    assert spec.memory[0].nbytes == pytest.approx(2 * spec.memory[1].nbytes)
    assert (spec.device, spec.device_bytes, spec.device_watts) == ("NVIDIA H100", 80_000_000_000, 700.0)
    assert spec.drives is None, "without a path there is no drive"
    limited = machine_in(make_tree(tmp_path, (64, "0-1"), (32, "2-3"), limit=10 << 30))
    assert limited.host_bytes == 10 << 30


def test_drive_has_the_space_that_is_free(tmp_path: Path) -> None:
    spec = machine_in(make_tree(tmp_path / "root", (64, "0-1"), (32, "2-3")), tmp_path / "not" / "yet")
    assert spec.drives is not None
    assert spec.drives.nbytes == pytest.approx(free_bytes(tmp_path), rel=0.05)
    assert (spec.drives.read_bytes_per_s, spec.drives.write_bytes_per_s) == (6e9, 3e9)


def test_every_field_of_a_measured_machine_has_a_source(tmp_path: Path) -> None:
    spec = machine_in(make_tree(tmp_path, (64, "0-1"), (32, "2-3")))
    assert set(spec.sources) == set(HardwareSpec.__dataclass_fields__) - {"name", "sources"}


def test_fingerprint_names_no_one(tmp_path: Path) -> None:
    root = make_tree(tmp_path, (64, "0-1"), (32, "2-3"))
    assert fingerprint(GPU.name, 2, root) == {
        "cpu": "EPYC 9004",
        "cores": 2,
        "device": "NVIDIA H100",
        "memory_gib": 96,
        "nodes": 2,
    }
    assert (cpu_model(tmp_path / "nothing"), total_bytes(root)) == ("unknown", 96 << 30)


def test_kept_rates_are_good_for_the_same_machine_only(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", (64, "0-1"), (32, "2-3"))
    spec, file = machine_in(root, tmp_path), tmp_path / "cache/megatrain/machine.json"
    marks = fingerprint(GPU.name, 2, root)
    assert load_measured(file, machine=marks, drive="nvme0n1") is None
    save_measured(file, spec, machine=marks, drive="nvme0n1")
    assert load_measured(file, machine=marks, drive="nvme0n1") == spec
    assert load_measured(file, machine=marks, drive="sda") == replace(spec, drives=None)
    assert load_measured(file, machine=marks | {"cores": 4}, drive="nvme0n1") is None
    assert load_measured(file, machine=fingerprint("cpu", 2, root), drive="nvme0n1") is None


def test_kept_rates_are_joined_with_what_is_free_now(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", (64, "0-1"), (32, "2-3"))
    spec = machine_in(root, tmp_path)
    make_tree(tmp_path / "root", (64, "0-1"), (32, "2-3"), available_gib=40)
    now = with_present_capacities(spec, device=replace(GPU, nbytes=7), path=tmp_path, root=root)
    assert (now.host_bytes, now.device_bytes) == (40 << 30, 7)
    assert now.update_params_per_s == spec.update_params_per_s
    assert with_present_capacities(spec, device=GPU, path=None, root=root).drives is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not JSON"),
        ("[]", "remove it and run doctor --bench again"),
        ('{"machine": {"cores": 2}, "spec": {"name": "x"}}', "are missing"),
    ],
)
def test_damaged_rates_are_named(tmp_path: Path, text: str, part: str) -> None:
    write(tmp_path / "machine.json", text)
    with pytest.raises(ConfigError, match=part):
        load_measured(tmp_path / "machine.json", machine={"cores": 2}, drive="")


def test_rates_that_cannot_be_kept_are_said(tmp_path: Path) -> None:
    write(tmp_path / "file", "")
    spec = machine_in(make_tree(tmp_path / "root", (64, "0-1"), (32, "2-3")))
    with pytest.raises(OutputError, match="the measured rates cannot be kept"):
        save_measured(tmp_path / "file/machine.json", spec, machine={}, drive="")
