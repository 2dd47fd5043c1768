"""The present machine: what the system says it has, joined with rates that somebody measured.

Every file is read below a `root`, so that tests use a tree of their own. Rates are measured where kernels and
lanes are known (`megatrain/doctor`); here they become a `HardwareSpec`, and are kept in a file that is good
for this machine only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError, OutputError
from megatrain.hardware.cores import cpu_list
from megatrain.hardware.machines import machine_json, parse_machine, read_json, write_json
from megatrain.hardware.memory import GIB, host_memory
from megatrain.hardware.spec import Drives, HardwareSpec, MemoryNode
from megatrain.hardware.system_files import field_bytes, number_of, text_of

ROOT = Path("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A NUMA node as the system describes it."""

    number: int
    nbytes: int
    cpus: frozenset[int]
    kind: str
    """`dram` or `cxl`."""
    claimed_bytes_per_s: float | None = None
    """The rate of reads that the firmware states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The accelerator, as its driver describes it."""

    name: str
    """`cpu` where the host computes."""
    nbytes: int | None = None
    """Free device memory; None: host memory is device memory."""
    watts: float | None = None
    """Power limit."""
    fuses_updates: bool = False
    """AdamW of resident blocks is one kernel there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """Rates of a machine, measured on it; fields as in `HardwareSpec`."""

    matmul_flops_per_s: Mapping[str, float]
    attention_flops_per_s: Mapping[str, float]
    device_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    both_share: float
    pageable_share: float
    node_bytes_per_s: tuple[float, ...]
    """One per node of `memory_nodes`, in its order."""
    update_params_per_s: Mapping[int, float]
    attention_backward_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    compressed_params_per_s: Mapping[str, float] = field(default_factory=dict)
    drive: DriveRates | None = None
    """Rates of the drive; None: they were not measured, so the machine is said to have none."""
    launch_s: float | None = None
    """The time of a launch; None: it was not measured."""
    launches_per_s: float | None = None
    """The rate of launches; None: it was not measured, or the host computes."""
    how: str = "measured"
    """The way in which rates were measured, with the sizes, for `sources`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveRates:
    """Rates of the drive below a directory."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    is_direct: bool
    is_duplex: bool


def memory_nodes(root: Path = ROOT) -> tuple[Node, ...]:
    """Return the nodes whose memory a process may use, those of CXL last.

    A node without cores is CXL memory if the system knows CXL memory devices, and else taken for the memory
    of an accelerator (GH200's is such a node), which is no host memory. Where the system shows no nodes, all
    memory is one.
    """
    has_cxl = any((root / "sys/bus/cxl/devices").glob("mem*"))
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = cpu_list(text_of(folder / "cpulist"))
        total = re.search(r"MemTotal:\s+(\d+) kB", text_of(folder / "meminfo"))
        nbytes = int(total[1]) * 1024 if total else 0
        if nbytes and (cpus or has_cxl):
            kind = "dram" if cpus else "cxl"
            claimed = number_of(folder / "access0/initiators/read_bandwidth")  # in MB/s
            nodes.append(
                Node(
                    number=int(folder.name[4:]),
                    nbytes=nbytes,
                    cpus=cpus,
                    kind=kind,
                    claimed_bytes_per_s=claimed * 1e6 if claimed else None,
                )
            )
    if not any(node.kind == "dram" for node in nodes):
        cpus = frozenset(range(os.cpu_count() or 1))
        return (Node(number=0, nbytes=total_bytes(root), cpus=cpus, kind="dram"),)
    return tuple(sorted(nodes, key=lambda node: (node.kind != "dram", node.number)))


def total_bytes(root: Path = ROOT) -> int:
    """Return the memory of the machine, whoever uses it."""
    total = field_bytes(root / "proc/meminfo", "MemTotal")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if total is None else total


def cpu_model(root: Path = ROOT) -> str:
    """Return the processor's name, `unknown` where the system does not say."""
    text = text_of(root / "proc/cpuinfo")
    found = re.search(r"^(?:model name|Model|CPU part)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else "unknown"


def fingerprint(device: str, num_cores: int, root: Path = ROOT) -> dict[str, Any]:
    """Return what tells this machine from another: no name of a host or a user is in it.

    Memory counts in whole GiB: the kernel's own share changes with its version.
    """
    return {
        "cpu": cpu_model(root),
        "cores": num_cores,
        "device": device,
        "memory_gib": round(total_bytes(root) / GIB),
        "nodes": len(memory_nodes(root)),
    }


def describe_machine(
    measured: Measurements, *, device: Device, num_cores: int, path: Path | None, root: Path = ROOT
) -> HardwareSpec:
    """Join measured rates with the capacities of now.

    Args:
        measured: rates, of this machine.
        device: where blocks run.
        num_cores: physical cores that this process may use.
        path: directory whose drive may hold state; None: no drive.
        root: of the file system that `/proc` and `/sys` are read from.
    """
    nodes = memory_nodes(root)
    rates = measured.node_bytes_per_s
    assert len(rates) == len(nodes), f"{len(rates)} rates for {len(nodes)} nodes"
    drives = None
    if measured.drive is not None and path is not None:
        drives = Drives(nbytes=max(1, free_bytes(path)), **asdict(measured.drive))
    named = {field.name for field in fields(HardwareSpec)} - {"launch_s"}
    found = {name: value for name, value in asdict(measured).items() if name in named}
    spec = HardwareSpec(
        name="this machine",
        device=device.name,
        device_bytes=device.nbytes,
        memory=tuple(
            MemoryNode(nbytes=node.nbytes, bytes_per_s=rate, kind=node.kind)
            for node, rate in zip(nodes, rates, strict=True)
        ),
        num_cores=num_cores,
        drives=drives,
        device_watts=device.watts,
        launch_s=measured.launch_s or 0.0,
        sources=_sources(measured),
        **found,
    )
    return with_present_capacities(spec, device=device, path=path, root=root)


def with_present_capacities(
    spec: HardwareSpec, *, device: Device, path: Path | None, root: Path = ROOT
) -> HardwareSpec:
    """Return the machine with the memory and the drive space that there is now."""
    available = host_memory(root).available_bytes
    spec = replace(
        spec.with_ram(max(1, available)), device_bytes=device.nbytes, fuses_updates=device.fuses_updates
    )
    if spec.drives is None or path is None:
        return replace(spec, drives=None)
    return replace(spec, drives=replace(spec.drives, nbytes=max(1, free_bytes(path))))


def existing_parent(path: Path) -> Path:
    """Return a directory, or the nearest one above it that is there."""
    return next(
        (level for level in (path, *path.absolute().parents) if level.is_dir()), path.absolute().parents[-1]
    )


def free_bytes(path: Path) -> int:
    """Return the bytes that may still be written below a directory, which need not exist yet.

    Raises:
        ConfigError: No directory above it can be read.
    """
    try:
        found = os.statvfs(existing_parent(path))
    except OSError as error:
        raise ConfigError(
            f"the free space of {path} is not known ({error.strerror}); give another"
        ) from error
    return found.f_bavail * found.f_frsize


def save_measured(file: Path, spec: HardwareSpec, *, machine: Mapping[str, Any], drive: str) -> None:
    """Keep measured rates for `load_measured`, with the machine and the drive that they are good for.

    Args:
        file: where; its folder is made.
        spec: the machine.
        machine: its `fingerprint`.
        drive: name of the drive that was measured.

    Raises:
        OutputError: The file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"the measured rates cannot be kept in {file} ({error.strerror})") from error
    write_json({"machine": dict(machine), "drive": drive, "spec": machine_json(spec)}, file)


def load_measured(file: Path, *, machine: Mapping[str, Any], drive: str) -> HardwareSpec | None:
    """Return what `save_measured` kept; None if there is nothing, or it is another machine's.

    Drives are left out where another one was measured.

    Raises:
        ConfigError: The file is damaged.
    """
    if not file.exists():
        return None
    kept = read_json(file, source=str(file))
    if not isinstance(kept, dict) or "spec" not in kept:
        raise ConfigError(f"{file} is not what doctor --bench keeps; remove it and run doctor --bench again")
    if kept.get("machine") != dict(machine):
        return None
    spec = parse_machine(kept["spec"], source=str(file))
    return spec if kept.get("drive") == drive else replace(spec, drives=None)


def _sources(measured: Measurements) -> dict[str, str]:
    how = measured.how
    said = {
        "name": None,
        "sources": None,
        "device": "as torch names it",
        "device_bytes": "free now",
        "memory": f"bytes: what this process may take now; rates: {how}",
        "num_cores": "physical cores that this process may use",
        "device_watts": "the power limit that the driver names",
        "host_watts": "not known",
        "price_usd": "not known",
        "price_per_hour_usd": "not known",
        "peak_flops_per_s": "not known: the rates of products stand for it",
        "launch_s": "not measured" if measured.launch_s is None else f"{how}, layers not compiled",
        "fuses_updates": "tried",
        "launches_per_s": "not measured"
        if measured.launches_per_s is None
        else f"{how}, layers not compiled",
        "compressed_params_per_s": how if measured.compressed_params_per_s else "not measured",
        "drives": "none asked for" if measured.drive is None else how,
    }
    return {
        field: text
        for field in HardwareSpec.__dataclass_fields__
        if (text := said.get(field, how)) is not None
    }
