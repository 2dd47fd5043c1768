"""The machine that a run is planned for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.hardware import Drives, HardwareSpec, MemoryNode, host_memory, measure_matmul_peak
from megatrain.optim.threads import update_threads, worker_threads
from megatrain.stream.devices import check_device, make_lanes
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from megatrain.stream.machine import emulated_spec

_log = logging.getLogger(__name__)

Measure = Callable[[], HardwareSpec]
"""Returns this machine as `doctor` knows it."""

_COPY_BYTES_PER_S = 8e9
_UPDATES_PER_S = 1.2e9
"""Of a thread."""
_DRIVE_BYTES_PER_S = 1e9


def machine_for(config: Config, measure: Measure | None = None) -> HardwareSpec:
    """Return the machine that a run's device stands for, with the drives that it may use.

    Args:
        config: Of the run.
        measure: Returns this machine's rates, for a run on a GPU or where they were measured before; None:
            rates of a common computer, since on a CPU little depends on them.
    """
    device = check_device(config.train.device)
    if device.partition(":")[0] in ("emulated", "checked"):
        lanes = make_lanes(device, config.memory.device_budget)
        machine = lanes.machine if isinstance(lanes, EmulatedLanes) else EmulatedMachine()
        lanes.close()
        spec = emulated_spec(
            replace(machine, device_bytes=lanes.device_limit), common_cpu(config.train.precision)
        )
    elif measure is not None:
        spec = measure()
    elif device == "cpu":
        spec = common_cpu(config.train.precision)
    else:
        raise ConfigError("a run on a GPU is planned with rates of its machine; pass `measure`")
    return replace(spec, drives=_drives(config, spec))


def common_cpu(precision: str) -> HardwareSpec:
    """Return this computer without a GPU: its own cores, memory and matrix products, other rates assumed."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    flops = {precision: measure_matmul_peak(torch.device("cpu"), dtype)}
    threads = update_threads().num_threads
    return HardwareSpec(
        name="this computer",
        device="cpu",
        device_bytes=None,
        matmul_flops_per_s=flops,
        attention_flops_per_s={name: rate / 2 for name, rate in flops.items()},
        device_bytes_per_s=_COPY_BYTES_PER_S,
        h2d_bytes_per_s=_COPY_BYTES_PER_S,
        d2h_bytes_per_s=_COPY_BYTES_PER_S,
        memory=(MemoryNode(nbytes=host_memory().available_bytes, bytes_per_s=2 * _COPY_BYTES_PER_S),),
        update_params_per_s={threads: threads * _UPDATES_PER_S},
        num_cores=worker_threads(),
        sources={"matmul_flops_per_s": "measured", "others": "assumed of a common computer"},
    )


def _drives(config: Config, spec: HardwareSpec) -> Drives | None:
    """Return the drives that `memory.tiers` names, at the rates that are known of this machine's."""
    tiers = config.memory.tiers
    if tiers == "auto" or not tiers.nvme:
        return None
    paths = [Path(path) for path in tiers.nvme]
    known = spec.drives or Drives(
        nbytes=0, read_bytes_per_s=_DRIVE_BYTES_PER_S, write_bytes_per_s=_DRIVE_BYTES_PER_S
    )
    # whether they hold it is for who opens them to say: a run that goes on has taken its room already
    return replace(known, nbytes=1 << 60, num_drives=len(paths))
