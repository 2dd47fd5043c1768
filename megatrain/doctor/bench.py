"""All rates of this machine, in a minute or, for a plan that must not wait, in seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatrain.config.optimizers.registry import OTHERS
from megatrain.doctor.drive import BLOCKS, FILE_BYTES, THREADS, DriveBench, measure_drive
from megatrain.doctor.overhead import visit_overhead_s
from megatrain.doctor.rates import (
    DTYPES,
    CopyRates,
    attention_rates,
    can_lock,
    copy_rates,
    device_memory_rate,
    lockable_bytes,
    thread_counts,
    update_rates,
)
from megatrain.hardware import host_memory, measure_matmul_peak, memory_rate
from megatrain.hardware.accelerators import give_back_memory
from megatrain.hardware.cores import allowed_cpus
from megatrain.hardware.this_machine import Measurements, Node, memory_nodes
from megatrain.optim.threads import worker_threads

_HEAD = 128
"""Size of an attention head whose rate stands for all that are not named."""

_VISIT_OPERATIONS = 58
"""Operations of a visit of the layer that overhead is measured with: the mean of forward and backward."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes and times of all measurements; with the defaults these take about 40 s in all."""

    seconds: float = 0.5
    """The time in which each rate is measured."""
    copy_bytes: int = 256 << 20
    node_bytes: int = 64 << 20
    """The size of each of the two buffers of each thread."""
    max_node_threads: int = 16
    """The threads of a node; so many fill its memory's pipes."""
    update_numel: int = 1 << 24
    attention_tokens: int = 4096
    """The tokens of a row on a GPU; a CPU takes an eighth of them."""
    file_bytes: int = FILE_BYTES
    blocks: Sequence[int] = BLOCKS
    drive_threads: Sequence[int] = THREADS
    cell_s: float = 0.7
    lock_bytes: int = 16 << 30
    """Memory to try to lock on a GPU, if a quarter of what is free is no less."""
    overhead_layers: int = 10
    """Layers of the model with which a visit's overhead is measured; 0: it is not measured."""
    compresses: bool = True
    """Whether other updates than the usual ones are measured: their kernels take seconds to compile."""


QUICK = Sizes(
    seconds=0.05,
    copy_bytes=64 << 20,
    node_bytes=64 << 20,
    attention_tokens=2048,
    file_bytes=64 << 20,
    blocks=(4 << 20,),
    drive_threads=(2,),
    cell_s=0.1,
    lock_bytes=0,
    overhead_layers=0,
    compresses=False,
)
"""Sizes that take under 3 s in all on two cores, once the kernels are compiled; rates have more noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """All that was measured."""

    rates: Measurements
    """The rates that make a machine."""
    copies: CopyRates
    nodes: tuple[tuple[Node, float], ...]
    drive: DriveBench | None
    locked_bytes: int | None
    """The bytes that could be locked for the device; None: there is no GPU."""
    lock_limit: int
    """The bytes that locking was tried with, at most."""
    launch_s: float | None
    """The time of a visit beside its arithmetic; None: it was not measured."""
    seconds: float


def run_bench(
    device: torch.device,
    directory: Path | None,
    sizes: Sizes | None = None,
    *,
    how: str = "measured on this machine by doctor --bench",
    show: Callable[[str], object] = _log.debug,
) -> Bench:
    """Measure everything, one after the other.

    Args:
        device: where blocks run.
        directory: whose drive is measured; None: no drive.
        sizes: how much and how long.
        how: for `sources` of the machine file.
        show: is told what is measured next.

    Raises:
        ConfigError: The directory cannot be written, or has no room.
    """
    sizes = sizes or Sizes()
    began_s = time.perf_counter()
    drive = None
    if directory is not None:  # first: it can fail, and takes longest
        show("measuring: drive")
        drive = measure_drive(
            directory,
            file_bytes=sizes.file_bytes,
            blocks=sizes.blocks,
            threads=sizes.drive_threads,
            cell_s=sizes.cell_s,
        )
    show("measuring: copies, host memory")
    copies = copy_rates(device, nbytes=sizes.copy_bytes, seconds=sizes.seconds)
    nodes = _measure_nodes(sizes)
    on_gpu = device.type != "cpu"
    device_rate = (
        device_memory_rate(device, nbytes=sizes.copy_bytes, seconds=sizes.seconds)
        if on_gpu
        else sum(rate for _, rate in nodes)
    )
    show("measuring: matrix products, attention, updates")
    tokens = sizes.attention_tokens if on_gpu else sizes.attention_tokens // 8
    attention = {
        name + ("" if width == _HEAD else f":{width}"): attention_rates(
            device, dtype, tokens=tokens, width=width, seconds=sizes.seconds
        )
        for name, dtype in DTYPES.items()
        for width in ((_HEAD, 64) if on_gpu else (_HEAD,))
    }
    matmul = {name: measure_matmul_peak(device, dtype) for name, dtype in DTYPES.items()}
    lock_limit = min(sizes.lock_bytes, host_memory().available_bytes // 4)
    launch_s = None
    if sizes.overhead_layers:
        show("measuring: a visit's overhead")
        launch_s = visit_overhead_s(device, num_layers=sizes.overhead_layers)
    updates = update_rates(thread_counts(worker_threads()), numel=sizes.update_numel, seconds=sizes.seconds)
    best = max(updates, key=lambda count: updates[count])
    compressed = {
        other.rate_key: update_rates(
            [best], numel=sizes.update_numel, seconds=sizes.seconds, optimizer=other
        )[best]
        for other in OTHERS
        if sizes.compresses
    }
    if on_gpu:
        give_back_memory(device)  # what is free of the device's memory is asked next
    rates = Measurements(
        matmul_flops_per_s=matmul,
        attention_flops_per_s={name: forward for name, (forward, _) in attention.items()},
        attention_backward_flops_per_s={name: backward for name, (_, backward) in attention.items()},
        device_bytes_per_s=device_rate,
        h2d_bytes_per_s=copies.h2d_locked,
        d2h_bytes_per_s=copies.d2h_locked,
        both_share=copies.both_share,
        pageable_share=copies.pageable_share,
        node_bytes_per_s=tuple(rate for _, rate in nodes),
        update_params_per_s=updates,
        compressed_params_per_s=compressed,
        drive=None if drive is None else drive.rates,
        launch_s=None if on_gpu else launch_s,
        launches_per_s=_VISIT_OPERATIONS / launch_s if on_gpu and launch_s else None,
        how=how,
    )
    return Bench(
        rates=rates,
        copies=copies,
        nodes=nodes,
        drive=drive,
        locked_bytes=lockable_bytes(lock_limit, partial(can_lock, device)) if on_gpu else None,
        lock_limit=lock_limit,
        launch_s=launch_s,
        seconds=time.perf_counter() - began_s,
    )


def _measure_nodes(sizes: Sizes) -> tuple[tuple[Node, float], ...]:
    """Measure each node by threads on its own cores.

    A node without cores (CXL) is not measured, since memory comes from the node of the thread that touches it
    first: what its firmware says is taken, or a quarter of the first node's rate, and said so.
    """
    allowed = allowed_cpus()
    found: list[tuple[Node, float]] = []
    for node in memory_nodes():
        if node.kind == "dram":
            cpus = node.cpus & allowed or allowed
            threads = max(1, min(len(cpus), worker_threads(), sizes.max_node_threads))
            rate = memory_rate(cpus, num_threads=threads, nbytes=sizes.node_bytes, seconds=sizes.seconds)
        else:
            rate = node.claimed_bytes_per_s or found[0][1] / 4
            _log.warning("node %d has no cores: %.3g bytes/s is not measured", node.number, rate)
        found.append((node, rate))
    return tuple(found)
