"""The machine that a run is planned for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.hardware import Drives, HardwareSpec, MemoryNode, host_memory, measure_matmul_peak
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.timing import time_layers
from megatrain.optim.threads import update_threads, worker_threads
from megatrain.plan.cost.measured import Measured
from megatrain.plan.cost.rates import Rates
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from megatrain.stream.lanes.devices import check_device, make_lanes
from megatrain.stream.lanes.emulated_spec import emulated_spec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_log = logging.getLogger(__name__)

Measure = Callable[[], HardwareSpec]
"""Returns this machine as `doctor` knows it."""

_COPY_BYTES_PER_S = 8e9
_UPDATES_PER_S = 1.2e9
"""Of a thread."""
_DRIVE_BYTES_PER_S = 1e9
_VISIT_S = 1.5e-3
"""Of Python, beside a layer's own."""

_MOST_LAYER_S = 1.0
"""A layer that takes longer is not run for a plan."""
_MOST_MEMORY = 0.25
"""Of what is left, that such a run may take."""


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


def with_layers_timed(
    spec: HardwareSpec, anatomy: Anatomy, model_config: PretrainedConfig, config: Config
) -> HardwareSpec:
    """Return this CPU at the rates that the model's own layers reach on it.

    One layer of every kind is run a few times; where that would take long, or much of the memory that is
    left, the rates stay as they are.
    """
    known = _TIMED.setdefault(anatomy, {})
    num_threads = torch.get_num_threads()
    if num_threads not in known:
        known[num_threads] = _time(spec, anatomy, model_config, config)
    return known[num_threads].applied(spec)


_TIMED: WeakKeyDictionary[Anatomy, dict[int, Measured]] = WeakKeyDictionary()
"""By model and number of threads: a process times it once."""


def _time(spec: HardwareSpec, anatomy: Anatomy, model_config: PretrainedConfig, config: Config) -> Measured:
    rates = Rates(spec, config.train.precision)
    weights = max(sum(part.sizes.working_bytes for part in layer.fragments) for layer in anatomy.layers)
    need = 3 * weights + 2 * max(layer.saved_bytes["keep"] for layer in anatomy.layers)
    seconds = max(rates.compute_s(layer.forward + layer.backward) for layer in anatomy.layers)
    if seconds > _MOST_LAYER_S or need > _MOST_MEMORY * host_memory().available_bytes:
        return Measured()
    timed = time_layers(
        model_config,
        micro_batch_size=anatomy.micro_batch_size,
        seq_len=anatomy.seq_len,
        precision=config.train.precision,
        attn_implementation=config.model.attn_implementation,
    )
    return Measured.of_layers(rates, anatomy, timed)


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
        launch_s=_VISIT_S,
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
