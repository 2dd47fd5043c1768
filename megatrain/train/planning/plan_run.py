"""From settings and a machine to a plan: what `megatrain plan` asks, before a byte is allocated.

A setting that the user has not given, or given as `auto`, is free: the planner chooses it. The data are not
looked at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config, build_config, set_keys
from megatrain.config.choice import Plan
from megatrain.data.packing import check_seq_len, context_length
from megatrain.errors import CapacityError, ConfigError
from megatrain.hardware import HardwareSpec, load_machine, machine_names
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.model.weights.skeleton import read_text_config
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.remedies import Remedy, device_bytes_held, enough_drives, list_remedies
from megatrain.plan.search.request import Request, usual_batch
from megatrain.train.planning.run_machine import with_layers_timed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TRAINING_SEARCH_S = 0.5
"""Seconds of search before a run begins."""

_NO_DATA = "not needed for a plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan, what it was asked for, and what should be said with it."""

    plan: Plan
    request: Request
    config: Config
    model: str
    """As it was given."""
    notes: tuple[str, ...]
    count_s: float
    """Seconds that counting the model took, and timing its layers on a CPU, beside `plan.plan_s`."""


def plan_run(
    raw: Mapping[str, Any],
    spec: HardwareSpec,
    *,
    source: str,
    hf_config: Path | None = None,
    is_complete: bool = True,
) -> Planned:
    """Plan a run.

    Args:
        raw: Settings as nested keys; the data may be missing.
        spec: The machine.
        source: Where the settings are from, named in every problem.
        hf_config: A file like a model directory's config.json; None: that of `model.path`.
        is_complete: The settings are of a run. Otherwise batch and precision, where they are not given, are
            those of a large one: bf16, sequences of 4,096 tokens, 131,072 tokens per step.

    Raises:
        ConfigError: A setting that is wrong, or settings that exclude each other.
        ModelError: A model that cannot be planned.
    """
    place = str(hf_config) if hf_config is not None else _model_path(raw)
    raw = _with(raw, {"model.path": place, "data.path": _NO_DATA})
    model_config = read_text_config(place)
    notes = []
    if not is_complete:
        given = raw
        raw = _with(raw, _defaults(raw, model_config))
        notes += _defaults_note(given, raw)
    config = build_config(raw, source=source)
    check_seq_len(config.data.seq_len, model_config)
    began_s = time.perf_counter()
    recount = partial(_count_once, model_config, config, _device_type(spec))
    anatomy = recount()
    count_s = time.perf_counter() - began_s
    request = make_request(config, anatomy, spec)
    plan = make_plan(request, remedies=_remedies(request, recount))
    notes += _notes(request)
    return Planned(
        plan=plan, request=request, config=config, model=place, notes=tuple(notes), count_s=count_s
    )


def plan_training(config: Config, model_config: PretrainedConfig, spec: HardwareSpec) -> Planned:
    """Plan a run that is about to begin.

    Args:
        config: Complete.
        model_config: Of the model that will be trained.
        spec: The machine.

    Raises:
        CapacityError: Nothing that the settings leave open makes it fit.
        ModelError: A model that cannot be counted.
    """
    began_s = time.perf_counter()
    recount = partial(_count_once, model_config, config, _device_type(spec))
    anatomy = recount()
    if spec.is_cpu:
        spec = with_layers_timed(spec, anatomy, model_config, config)
    count_s = time.perf_counter() - began_s
    request = make_request(config, anatomy, spec)
    remedies = list_remedies(request, recount, is_running=True)
    plan = make_plan(request, remedies=remedies, budget_s=_TRAINING_SEARCH_S)
    if not plan.fits:
        raise CapacityError(plan.problem)
    return Planned(
        plan=plan, request=request, config=config, model=config.model.path, notes=(), count_s=count_s
    )


def make_request(config: Config, anatomy: Anatomy, spec: HardwareSpec) -> Request:
    """Return what settings ask of the planner: what is given is fixed, all else is free.

    Raises:
        ConfigError: More resident layers than the model has.
    """
    return Request(
        spec=spec,
        anatomy=anatomy,
        batch=config.batch,
        clips=config.optim.max_grad_norm is not None,
        state=config.optim.state,
        commits=config.memory.tiers != "auto" and bool(config.memory.tiers.nvme),
        compiles=config.train.compile == "on" or (config.train.compile == "auto" and not spec.is_cpu),
        fuses=config.model.kernels == "liger",
        device_limit=config.memory.device_budget,
        host_limit=config.memory.host_budget,
        choice=config.choice.for_layers(len(anatomy.layers)),
    )


def _model_path(raw: Mapping[str, Any]) -> str:
    path = _value(raw, "model", "path")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            "no model to plan for; give a CONFIG with model.path, --model DIR_OR_ID, or --hf-config FILE"
        )
    return os.path.expanduser(path)


def _value(raw: Mapping[str, Any], section: str, name: str) -> Any:
    inner = raw.get(section)
    return inner.get(name) if isinstance(inner, Mapping) else None


def _with(raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with values for the keys that they do not have."""
    missing = []
    for key, value in values.items():
        section, _, name = key.partition(".")
        inner = raw.get(section)
        if not isinstance(inner, Mapping) or name not in inner:
            missing.append((key, value))
    return set_keys(raw, missing)


def _defaults(raw: Mapping[str, Any], model_config: PretrainedConfig) -> dict[str, Any]:
    """Return batch and precision of a large run, for a model with this context."""

    def given(section: str, name: str) -> int:
        value = _value(raw, section, name)
        return value if isinstance(value, int) and value > 0 else 0

    optim = raw.get("optim")
    is_clipped = not isinstance(optim, Mapping) or optim.get("max_grad_norm", 1.0) is not None
    batch = usual_batch(
        context_length(model_config),
        seq_len=given("data", "seq_len"),
        micro_batch_size=given("train", "micro_batch_size") or 1,
    )
    return {
        "data.seq_len": batch.seq_len,
        "train.micro_batch_size": batch.micro_batch_size,
        "train.grad_accumulation": batch.num_micro_batches,
        "train.precision": "bf16",
        **({} if is_clipped else {"optim.updates": "auto"}),
    }


def _defaults_note(given: Mapping[str, Any], raw: Mapping[str, Any]) -> list[str]:
    chosen = [
        f"{section}.{name}={value}"
        for section in ("data", "train", "optim")
        for name, value in raw.get(section, {}).items()
        if name not in (given.get(section) or {}) and name != "path"
    ]
    return [f"not given, so taken as {', '.join(chosen)}"] if chosen else []


def _device_type(spec: HardwareSpec) -> str:
    """Return whose kernels run: an emulated accelerator computes on the CPU."""
    return "cpu" if spec.is_cpu or spec.launches_inline else "cuda"


def _count(model_config: PretrainedConfig, config: Config, device_type: str, **changes: Any) -> Anatomy:
    """Count the model for the batch and the precision of a run, or with one of these changed."""
    shape = {
        "micro_batch_size": config.train.micro_batch_size,
        "seq_len": config.data.seq_len,
        "precision": config.train.precision,
    }
    return count_anatomy(
        model_config,
        **{**shape, **changes},
        attn_implementation=config.model.attn_implementation,
        head_chunk_tokens=config.memory.head_chunk_tokens or None,
        device_type=device_type,
    )


def _count_once(model_config: PretrainedConfig, config: Config, device_type: str, **changes: Any) -> Anatomy:
    """Count as `_count`, but a model of the same configuration once per process."""
    key = (
        model_config.to_json_string(use_diff=False),
        config.train.micro_batch_size,
        config.data.seq_len,
        config.train.precision,
        config.model.attn_implementation,
        config.memory.head_chunk_tokens,
        device_type,
        *sorted(changes.items()),
    )
    if key not in _COUNTED:
        if len(_COUNTED) >= _MOST_COUNTED:
            _COUNTED.clear()
        _COUNTED[key] = _count(model_config, config, device_type, **changes)
    return _COUNTED[key]


_COUNTED: dict[tuple[object, ...], Anatomy] = {}
_MOST_COUNTED = 16


def _remedies(request: Request, recount: Callable[..., Anatomy]) -> Iterator[Remedy]:
    yield from list_remedies(request, recount)
    yield from _other_machines(request)


def _other_machines(request: Request) -> Iterator[Remedy]:
    """Yield larger devices, the smallest first: in this host, in their machine file's, with more drives."""
    machines = [load_machine(name) for name in machine_names()]
    own = request.spec
    least = max(own.device_bytes or 0, device_bytes_held(request))
    larger = [m for m in machines if not m.is_cpu and (m.device_bytes or 0) > least]
    for spec in sorted(larger, key=lambda machine: machine.device_bytes or 0) if not own.is_cpu else ():
        larger_drives = enough_drives(request)
        hosts = [replace(spec.with_ram(own.host_bytes), drives=own.drives), spec]
        if larger_drives > (0 if spec.drives is None else spec.drives.nbytes):
            hosts.append(spec.with_drive_bytes(larger_drives))
        for other in hosts:
            drives = 0 if other.drives is None else other.drives.nbytes
            sizes = f"--ram {_exact(other.host_bytes)} --nvme {_exact(drives)}"
            yield Remedy(partial(replace, request, spec=other), f"--machine {spec.name} {sizes}")


def _exact(nbytes: int) -> str:
    for unit, name in ((10**9, "GB"), (1 << 30, "GiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)


def _notes(request: Request) -> list[str]:
    anatomy, spec = request.anatomy, request.spec
    notes = []
    if anatomy.part:
        tower = sum(f.num_params for layer in anatomy.layers for f in layer.fragments)
        tower += sum(part.num_params for part in anatomy.outer)
        notes.append(
            f"planned for the {anatomy.part}: {tower / 1e9:.3f} B of the model's "
            f"{anatomy.num_params / 1e9:.3f} B parameters"
        )
    if anatomy.num_active_params < 0.98 * anatomy.num_params and not anatomy.part:
        notes.append(
            f"a token passes {anatomy.num_active_params / 1e9:.3g} B of {anatomy.num_params / 1e9:.4g} B "
            "parameters; the model's experts are counted as evenly used, and all of them stream and update"
        )
    if "assumed" in spec.sources.get("matmul_flops_per_s", ""):
        notes.append(
            f"rates of {spec.name} are vendors' figures times assumed shares, not measured; on the machine "
            "itself, megatrain doctor --bench measures them"
        )
    if request.state != "fp32":
        notes.append(f"moments in {request.state} are not exact: the result differs from AdamW's")
    return notes
