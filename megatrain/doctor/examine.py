"""The doctor's visit: every check, and with a bench every rate; as text, and as one JSON object."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatrain.doctor.bench import Bench, Sizes, run_bench
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
    warning,
)
from megatrain.doctor.disk import block_device
from megatrain.doctor.host_errors import check_memory_errors
from megatrain.doctor.machine_spec import compute_device, machine_of, open_own_sensor
from megatrain.doctor.proof import Proof, prove
from megatrain.doctor.smart import check_smart, read_smart
from megatrain.doctor.software import check_device, check_sensor, check_updates, check_versions, versions
from megatrain.errors import OutputError
from megatrain.hardware.cores import allowed_cpus
from megatrain.hardware.health import pci_address
from megatrain.hardware.machines import machine_json
from megatrain.hardware.memory import GIB
from megatrain.hardware.spec import HardwareSpec
from megatrain.hardware.system_files import number_of
from megatrain.hardware.this_machine import memory_nodes
from megatrain.optim.threads import update_threads

_log = logging.getLogger(__name__)

_COLUMNS = 110
_WIDTH = 22
"""Columns of a check's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The findings of the doctor. They name no user, host or path."""

    checks: tuple[Check, ...]
    bench: Bench | None = None
    machine: HardwareSpec | None = None
    """The machine as the bench has measured it."""
    proof: Proof | None = None
    """What `prove` has found, whose checks are among these."""

    def count(self, level: Level) -> int:
        """Return how many checks have a level."""
        return sum(check.level is level for check in self.checks)

    def exit_code(self, strict: bool) -> int:
        """Return 3 if a strict caller wants no failure and there is one, else 0."""
        return 3 if strict and self.count(Level.FAIL) else 0

    def text(self) -> str:
        """Return the table: a line per check, the fix below it, rates, and the count."""
        lines = [line for check in self.checks for line in _lines(check)]
        if self.bench is not None:
            for name, text in _rates(self.bench):
                lines += _wrapped(f" RATE  {name:{_WIDTH}} ", text)
        counts = ", ".join(f"{self.count(level)} {level.value}" for level in Level)
        return "\n".join([*lines, f" {counts}; with --strict a FAIL exits with 3"])

    def json(self) -> dict[str, Any]:
        """Return everything, for a program or a bug report."""
        found: dict[str, Any] = {
            "versions": versions(),
            "checks": [asdict(check) | {"level": check.level.value} for check in self.checks],
            "counts": {level.value: self.count(level) for level in Level},
            "bench": None if self.bench is None else bench_json(self.bench),
            "machine": None if self.machine is None else machine_json(self.machine),
        }
        return found if self.proof is None else {**found, "proof": self.proof.json()}

    def save(self, file: Path) -> None:
        """Write everything to one file, which is to be sent.

        Raises:
            OutputError: The file cannot be written.
        """
        try:
            file.write_text(json.dumps(self.json(), indent=1) + "\n")
        except OSError as error:
            raise OutputError(
                f"cannot write {file}: {error.strerror}; give another directory (--path)"
            ) from error


def examine(
    path: Path,
    *,
    omp_num_threads: str | None = None,
    bench: bool = False,
    proves: bool = False,
    sizes: Sizes | None = None,
    progress: Callable[[str], object] = lambda doing: None,
) -> Report:
    """Look at this machine.

    Args:
        path: directory that runs will write to.
        omp_num_threads: the environment's; None: not set.
        bench: measure rates too, for up to a minute; writes and removes a file in `path`.
        proves: measure rates, and train for a minute; see `doctor.proof`.
        sizes: of the bench.
        progress: is told what takes time, before it begins.

    Raises:
        ConfigError: The bench cannot write to `path`.
    """
    progress("looking at versions, memory, threads and disks")
    device = compute_device()
    on_gpu = device.type == "cuda"
    checks = [check_versions(), check_device(device)]
    node, sensor = None, None
    drive = block_device(path)
    smart = read_smart(drive.name)
    if smart is not None and smart.used is not None:
        drive = replace(drive, life_used=smart.used)
    if on_gpu:
        sensor = open_own_sensor()
        checks += [check_updates(device), *check_sensor(sensor)]
        node = _device_node(torch.cuda.get_device_properties(device))
    checks += [
        check_memory(),
        check_swap(),
        check_lockable(on_gpu),
        check_huge_pages(),
        check_nodes(memory_nodes(), allowed_cpus(), node),
        check_threads(update_threads(), omp_num_threads),
        check_memory_errors(),
        *check_disk(path, drive),
        check_smart(smart),
        check_shm(),
    ]
    if not (bench or proves):
        return Report(checks=tuple(checks))
    progress("measuring rates")
    found = run_bench(device, path, sizes, show=_log.info)
    checks += check_bench(found, on_gpu)
    machine = machine_of(found, path, sensor)
    proof = prove(device, machine, progress=progress) if proves else None
    checks += [] if proof is None else proof.checks
    return Report(checks=tuple(checks), bench=found, machine=machine, proof=proof)


def check_bench(bench: Bench, on_gpu: bool) -> list[Check]:
    """Judge what was measured."""
    checks = []
    if bench.drive is not None and not bench.drive.is_direct:
        rate = bench.drive.rates
        checks.append(
            warning(
                "direct I/O",
                "the file system has none: reads and writes go through the page cache "
                f"({rate.read_bytes_per_s / 1e9:.2f} and {rate.write_bytes_per_s / 1e9:.2f} GB/s here), "
                "which costs about 6 times the CPU time",
                "give a directory on ext4 or xfs with --path",
            )
        )
    refused = None if bench.locked_bytes is None else max(GIB, 2 * bench.locked_bytes)
    if refused is not None and refused <= bench.lock_limit:
        checks.append(
            warning(
                "locked memory",
                f"{refused / GIB:g} GiB could not be locked at once: copies go through a buffer, and "
                "are slower",
                "look at the limits of the container (docker run --ulimit memlock=-1) and at the driver",
            )
        )
    elif on_gpu and bench.copies.pageable_share > 0.95:
        checks.append(
            warning(
                "locked memory",
                "copies from locked memory are no faster than from pageable memory",
                "look at the limits of the container (docker run --ulimit memlock=-1) and at the driver",
            )
        )
    return checks


def _lines(check: Check) -> Iterator[str]:
    yield from _wrapped(f" {check.level.value:4}  {check.name:{_WIDTH}} ", check.text)
    if check.fix:
        yield from _wrapped(f"{'':{_WIDTH + 8}}-> ", check.fix)


def _wrapped(head: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _rates(bench: Bench) -> Iterator[tuple[str, str]]:
    copies, is_cpu = bench.copies, bench.copies.h2d_locked == bench.copies.h2d_pageable
    if is_cpu:
        yield (
            "copy",
            f"{copies.h2d_locked / 1e9:.1f} GB/s from one host buffer to another (no GPU), two at once "
            f"{copies.both / 1e9:.1f}",
        )
    else:
        yield (
            "host to device",
            f"{copies.h2d_locked / 1e9:.1f} GB/s locked, {copies.h2d_pageable / 1e9:.1f} pageable",
        )
        yield (
            "device to host",
            f"{copies.d2h_locked / 1e9:.1f} GB/s locked, {copies.d2h_pageable / 1e9:.1f} pageable",
        )
        yield "both at once", f"{copies.both / 1e9:.1f} GB/s added"
    found = bench.rates
    of_products = ("matrix products", found.matmul_flops_per_s)
    for name, rates in (of_products, ("causal attention", found.attention_flops_per_s)):
        yield name, ", ".join(f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in rates.items())
    updates = ", ".join(f"{count}: {rate / 1e9:.2f}" for count, rate in found.update_params_per_s.items())
    yield "AdamW by threads", f"{updates} G parameters/s"
    for node, rate in bench.nodes:
        yield f"memory of node {node.number}", f"{rate / 1e9:.1f} GB/s read and written ({node.kind})"
    if bench.drive is not None:
        how = "direct" if bench.drive.is_direct else "through the page cache"
        for cell in bench.drive.cells:
            yield (
                f"drive {cell.block_bytes / 2**20:g} MiB x {cell.num_threads}",
                f"read {cell.read_bytes_per_s / 1e9:.2f}, write {cell.write_bytes_per_s / 1e9:.2f} GB/s, "
                f"{how}",
            )
    if bench.locked_bytes is not None:
        yield "locked memory", f"{bench.locked_bytes / GIB:g} GiB or more could be locked at once"
    if bench.launch_s is not None:
        yield "visit of a layer", f"{bench.launch_s * 1e3:.2f} ms beside its arithmetic, not compiled"
    yield "bench", f"{bench.seconds:.0f} s"


_SHOWN = (
    *("device_bytes_per_s", "matmul_flops_per_s", "compressed_params_per_s"),
    *("attention_flops_per_s", "attention_backward_flops_per_s"),
)


def bench_json(bench: Bench) -> dict[str, Any]:
    """Return what was measured, for a program."""
    return {
        "copies": asdict(bench.copies),
        **{name: value for name, value in asdict(bench.rates).items() if name in _SHOWN},
        "update_params_per_s": {str(n): rate for n, rate in bench.rates.update_params_per_s.items()},
        "nodes": [
            {"number": node.number, "kind": node.kind, "nbytes": node.nbytes, "bytes_per_s": rate}
            for node, rate in bench.nodes
        ],
        "drive": None if bench.drive is None else asdict(bench.drive),
        "locked_bytes": bench.locked_bytes,
        "launch_s": bench.launch_s,
        "seconds": bench.seconds,
    }


def _device_node(properties: Any) -> int | None:
    """Return the NUMA node of a PCI device; None if the system does not tell."""
    address = pci_address(properties)
    if address is None:
        return None
    return number_of(Path(f"/sys/bus/pci/devices/{address}/numa_node"))
