"""The machine that a run is planned for: its measurement, its use and its supervision."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from megatrain.config import Config
from megatrain.hardware import HardwareSpec, host_memory, measure_matmul_peak
from megatrain.hardware.health import MachineHealth, power_cap_advice, sensor_of
from megatrain.model.liger import apply_liger, uses_liger
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.timing import time_layers
from megatrain.optim.threads import update_threads, worker_threads
from megatrain.plan.cost.measured import Measured
from megatrain.plan.cost.rates import Rates
from megatrain.store.drives.places import room_of
from megatrain.stream.lanes.devices import check_device, compute_device
from megatrain.stream.machine import Measure, common_cpu, machine_of, matmul_peak_of_cpu
from megatrain.train.attention import attention_of
from megatrain.train.caller import Caller
from megatrain.train.planning.counting import PlannedModel, device_type
from megatrain.train.planning.lately import Lately

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_log = logging.getLogger(__name__)

_MOST_LAYER_S = 1.0
"""The seconds above which a layer is not run for a plan."""
_MOST_MEMORY = 0.25
"""The share of the remaining memory that such a run may take."""


def ready_to_plan(
    config: Config,
    source: str,
    model_config: PretrainedConfig,
    packing: str,
    caller: Caller,
    document_len: int | None = None,
) -> PlannedModel:
    """Return the planned model of a run, after settling this process's threads, kernels and speed.

    Args:
        config: The settings of the run.
        source: The place of the model.
        model_config: The configuration that was read there.
        packing: The packing of its rows.
        caller: The folder of counts, and the function that shows progress.
        document_len: The length of documents, as in `PlannedModel`.
    """
    choose_threads()
    liger = uses_liger(config.model.kernels, compute_device(config.train.device).type)
    if liger:
        apply_liger(model_config.get_text_config().model_type)
    caller.progress("planning where memory goes")
    measure_peak(config)
    # the kept counts are of transformers' own modules, and of the model as it is saved
    is_other = liger or bool(config.model.new_tokens)
    counts = None if is_other else caller.counts
    return PlannedModel(
        source, counts, caller.progress, model_config, packing, document_len, config.model.rope_scaling
    )


def machine_for(config: Config, measure: Measure | None = None, lately: Lately | None = None) -> HardwareSpec:
    """Return the machine of a run's device, with the drives that it may use.

    Args:
        config: The settings of the run.
        measure: The measurement, as in `machine_of`.
        lately: The recent measurements of a CPU; None measures it anew.
    """
    precision = config.train.precision
    is_cpu = check_device(config.train.device) == "cpu"
    if measure is None and lately is not None and is_cpu:
        flops = partial(matmul_peak_of_cpu, precision)
        named = {"what": "products", "precision": precision, "threads": torch.get_num_threads()}
        measure = partial(common_cpu, precision, lately.number(flops, **named))
    spec = machine_of(
        config.train.device,
        precision,
        device_limit=config.memory.device_budget,
        **_drives_of(config),
        measure=measure,
    )
    return spec if lately is None or not is_cpu else spec.with_ram(lately.free_bytes(spec.host_bytes))


def _drives_of(config: Config) -> dict[str, int]:
    """Return the number of drives that a run may use and their room, as arguments of `machine_of`."""
    places = [Path(place) for place in config.memory.drives]
    return {"num_drives": len(places), "drive_bytes": room_of(places)} if places else {}


def with_layers_timed(
    spec: HardwareSpec, anatomy: Anatomy, model: PlannedModel, config: Config, lately: Lately
) -> HardwareSpec:
    """Return this CPU at the rates that the model's own layers reach on it.

    One layer of every kind is run a few times. Where that would take long, or much of the memory that is
    left, the rates stay as they are.

    Args:
        spec: The CPU.
        anatomy: The count of the model for the run's micro-batches.
        model: The model that is counted.
        config: The settings, in which nothing is open.
        lately: The recent timings.
    """
    known = _TIMED.setdefault(anatomy, {})
    num_threads = torch.get_num_threads()
    if num_threads not in known:
        scale = lately.number(
            lambda: _time(spec, anatomy, model.config, config).compute_scale,
            what="layers",
            threads=num_threads,
            flops=spec.matmul_flops_per_s[config.train.precision],
            **model.described(config, device_type(spec)),
        )
        known[num_threads] = Measured(compute_scale=scale)
    return known[num_threads].applied(spec)


_TIMED: WeakKeyDictionary[Anatomy, dict[int, Measured]] = WeakKeyDictionary()
"""The timings by model and number of threads, so that a process times each once."""


def _time(spec: HardwareSpec, anatomy: Anatomy, model_config: PretrainedConfig, config: Config) -> Measured:
    rates = Rates(spec, config.train.precision)
    weights = max(sum(part.sizes.working_bytes for part in layer.fragments) for layer in anatomy.layers)
    need = 3 * weights + 2 * max(layer.saved_bytes["keep"] for layer in anatomy.layers)
    seconds = max(
        rates.forward_s(layer.forward) + rates.backward_s(layer.backward) for layer in anatomy.layers
    )
    if seconds > _MOST_LAYER_S or need > _MOST_MEMORY * host_memory().available_bytes:
        return Measured()
    timed = time_layers(
        model_config,
        micro_batch_size=anatomy.micro_batch_size,
        seq_len=config.batch.seq_len,
        precision=config.train.precision,
        attn_implementation=attention_of(config, has_varlen=False),
        adaptation=config.adaptation,
        sequence=config.batch.sequence,
    )
    return Measured.of_layers(rates, anatomy, timed)


def make_health(config: Config) -> MachineHealth:
    """Return the watch over the machine, and log how to set the power cap that is wished for."""
    sensor = sensor_of(compute_device(config.train.device))
    cap_w = config.hardware.power_cap
    advice = None if cap_w is None else power_cap_advice(sensor, cap_w)
    if advice is not None:
        _log.warning("%s", advice)
    return MachineHealth(sensor, rated_bytes_written=config.hardware.rated_bytes_written)


def choose_threads() -> None:
    """Limit torch's threads to the cores that this process may use, since more would wait for each other."""
    allowed = worker_threads()
    if torch.get_num_threads() > allowed:
        torch.set_num_threads(allowed)
    _log.debug("torch threads: %d", torch.get_num_threads())
    _log.debug("%s", update_threads().describe())


def measure_peak(config: Config) -> None:
    """Measure the peak that MFU is a share of, while there is still room on the device."""
    device = compute_device(config.train.device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.train.precision]
    peak = measure_matmul_peak(device, dtype)
    _log.debug("matrix products: %.4g TFLOP/s in %s on %s, measured", peak / 1e12, dtype, device)
