"""The machine that a device stands for, as the planner wants it described."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.config.optimizers.registry import DEFAULT
from megatrain.hardware import (
    Drives,
    HardwareSpec,
    MemoryNode,
    host_memory,
    load_machine,
    machine_names,
    measure_matmul_peak,
    memory_rate,
)
from megatrain.hardware.accelerators import device_name, free_bytes, vendor_of
from megatrain.hardware.cores import allowed_cpus
from megatrain.optim.threads import update_threads, worker_threads
from megatrain.optim.updates import fuses_updates
from megatrain.stream.lanes import CheckedLanes, EmulatedLanes, EmulatedMachine, Lanes
from megatrain.stream.lanes.devices import check_device, compute_device, make_lanes
from megatrain.stream.lanes.emulated_spec import emulated_spec
from megatrain.stream.lanes.locked_ring import LockedRing

Measure = Callable[[], HardwareSpec]
"""Returns this machine as `doctor` knows it."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_COPY_BYTES_PER_S = 8e9
_UPDATES_PER_S = 1.2e9
"""Of a thread."""
_DRIVE_BYTES_PER_S = 1e9
_UNKNOWN_BYTES = 1 << 60
"""More than any drive has: whoever opens the drives says whether they hold the state."""
_VISIT_S = 1.5e-3
"""Of Python, beside a layer's own."""
_LINK_BYTES = 64 << 20
"""That are copied to see how fast a GPU's link is."""
_MEMORY_BYTES, _MEMORY_S = 64 << 20, 0.2
"""Of each thread that copies, and for how long, to see how fast the host's memory is."""
_MEASURED = ("matmul_flops_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "memory")
_COMMON_GPU = "rtx-4090"
"""Machine file of a GPU that has none of its own."""


def machine_of(
    device: str | torch.device | Lanes,
    precision: str,
    *,
    device_limit: int | None = None,
    num_drives: int = 0,
    drive_bytes: int = _UNKNOWN_BYTES,
    measure: Measure | None = None,
) -> HardwareSpec:
    """Return the machine that a device stands for, with the drives that a run may use.

    Args:
        device: The device, as in `attach`, or the lanes that were made of it.
        precision: The precision, `fp32` or `bf16`, of the matrix products that are measured.
        device_limit: The number of bytes that a run may take of an emulated device.
        num_drives: The number of drives on which state is; 0: none.
        drive_bytes: What the state may take there. Where it is there already, they have room for it.
        measure: The function that returns this machine's rates where they are known better than by
            `common_cpu` and `common_gpu`.
    """
    lanes = device if isinstance(device, Lanes) else None
    name = device.device.type if isinstance(device, Lanes) else check_device(str(device))
    if name.partition(":")[0] in ("emulated", "checked"):
        lanes = make_lanes(name, device_limit)
        lanes.close()
    if isinstance(lanes, (CheckedLanes, EmulatedLanes)):
        machine = lanes.machine if isinstance(lanes, EmulatedLanes) else EmulatedMachine()
        spec = emulated_spec(replace(machine, device_bytes=lanes.device_limit), common_cpu(precision))
    elif measure is not None:
        spec = measure()
    elif name == "cpu":
        spec = common_cpu(precision)
    else:
        spec = common_gpu(lanes.device if lanes is not None else compute_device(name), precision)
    return replace(spec, drives=_drives(num_drives, drive_bytes, spec))


def common_cpu(precision: str, matmul_flops_per_s: float | None = None) -> HardwareSpec:
    """Return this computer without a GPU: its own cores, memory and matrix products, other rates assumed.

    Args:
        precision: The precision of the matrix products.
        matmul_flops_per_s: The rate of these products; None: it is measured.
    """
    flops = {precision: matmul_flops_per_s or matmul_peak_of_cpu(precision)}
    return HardwareSpec(
        name="this computer",
        device="cpu",
        device_bytes=None,
        matmul_flops_per_s=flops,
        attention_flops_per_s={name: rate / 2 for name, rate in flops.items()},
        device_bytes_per_s=_COPY_BYTES_PER_S,
        h2d_bytes_per_s=_COPY_BYTES_PER_S,
        d2h_bytes_per_s=_COPY_BYTES_PER_S,
        launch_s=_VISIT_S,
        sources={"matmul_flops_per_s": "measured", "others": "assumed of a common computer"},
        **_own_host(),
    )


def matmul_peak_of_cpu(precision: str) -> float:
    """Return the FLOP/s of matrix products on this computer without a GPU."""
    return measure_matmul_peak(torch.device("cpu"), _DTYPES[precision])


def common_gpu(device: torch.device, precision: str) -> HardwareSpec:
    """Return this computer with its GPU: own products, link, memory and cores; other rates as of its kind."""
    name = device_name(device)
    of_its_kind = [kind for kind in machine_names() if kind.replace("-", " ") in name.lower()]
    flops = measure_matmul_peak(device, _DTYPES[precision])
    down, up = _link_bytes_per_s(device)
    spec = load_machine(max(of_its_kind, key=len, default=_COMMON_GPU))
    return replace(
        spec,
        name="this computer",
        device=name,
        device_bytes=free_bytes(device),
        fuses_updates=fuses_updates(DEFAULT, device),
        matmul_flops_per_s={**spec.matmul_flops_per_s, precision: flops},
        h2d_bytes_per_s=down,
        d2h_bytes_per_s=up,
        # at the rates of its kind's drives; what these drives bear is for their owner to say
        drives=None if spec.drives is None else replace(spec.drives, rated_bytes_written=None),
        sources={**dict.fromkeys(_MEASURED, "measured"), "others": spec.name},
        **_own_host(_host_bytes_per_s()),
    )


def _own_host(bytes_per_s: float = 2 * _COPY_BYTES_PER_S) -> dict[str, Any]:
    """Return what is known of this computer without its device, as fields of `HardwareSpec`."""
    threads = update_threads().num_threads
    return {
        "memory": (MemoryNode(nbytes=host_memory().available_bytes, bytes_per_s=bytes_per_s),),
        "update_params_per_s": {threads: threads * _UPDATES_PER_S},
        "num_cores": worker_threads(),
    }


def _host_bytes_per_s() -> float:
    """Return the rate of the host's memory, read and written together, by as many threads as update.

    Updates, sums and copies share it, and a server has ten times as much of it as a desktop.
    """
    threads = worker_threads()
    return memory_rate(allowed_cpus(), num_threads=threads, nbytes=_MEMORY_BYTES, seconds=_MEMORY_S)


def _link_bytes_per_s(device: torch.device) -> tuple[float, float]:
    """Return the best of a few copies to an accelerator, and home, made as those of the state are."""
    is_lockable = vendor_of(device).lock is not None
    host = torch.ones(_LINK_BYTES, dtype=torch.uint8, pin_memory=is_lockable)
    there = torch.empty_like(host, device=device)
    copy = partial(Tensor.copy_, non_blocking=True) if is_lockable else LockedRing(device).copy
    return _best_rate(device, lambda: copy(there, host)), _best_rate(device, lambda: copy(host, there))


def _best_rate(device: torch.device, copy: Callable[[], object]) -> float:
    taken = []
    for _ in range(4):
        torch.accelerator.synchronize(device)
        began_s = time.perf_counter()
        copy()
        torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - began_s)
    return _LINK_BYTES / min(taken)


def _drives(count: int, nbytes: int, spec: HardwareSpec) -> Drives | None:
    """Return the drives that a run uses, at the rates that are known of this machine's."""
    if not count:
        return None
    known = spec.drives or Drives(
        nbytes=0, read_bytes_per_s=_DRIVE_BYTES_PER_S, write_bytes_per_s=_DRIVE_BYTES_PER_S
    )
    return replace(known, nbytes=nbytes, num_drives=count)
