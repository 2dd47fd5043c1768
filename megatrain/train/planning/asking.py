"""The questions to the planner: settings with all that a run would decide, its data, and its machine.

A setting that the user has left out, or given as `auto`, is decided by the functions that the run itself
uses. Data, where there are some, are tokenised or found prepared; no weight is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config, build_config, set_keys
from megatrain.config.adaptation import AS_STORED
from megatrain.config.budgets import ALL
from megatrain.config.choice import AUTO
from megatrain.config.decided import as_begun, with_rows, with_step
from megatrain.config.sizes import binary
from megatrain.errors import ConfigError
from megatrain.hardware import HardwareSpec
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.sequence.range import check_row
from megatrain.plan.search.options import as_apart
from megatrain.plan.search.request import Request
from megatrain.train.caller import NOBODY, Caller
from megatrain.train.planning.counting import PlannedModel, device_type
from megatrain.train.planning.gpus import of_ranks
from megatrain.train.planning.lately import Lately
from megatrain.train.planning.micro_batches import with_fastest_size
from megatrain.train.resume.point import NEW_RUN, ResumePoint
from megatrain.train.shards import with_shards

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megatrain.stream.machine import Measure
    from megatrain.train.run_data import RunData

_NO_DATA = "not needed for a plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A question to the planner, before anything is planned."""

    request: Request
    """The request for all ranks together."""
    given: Config
    """The settings as they were given."""
    config: Config
    """The settings, in which nothing is open."""
    model: str
    recount: Callable[..., Anatomy]
    count_s: float
    notes: tuple[str, ...]
    data: RunData | None = None
    """The data, or None if they were not looked at."""

    @property
    def num_steps(self) -> int | None:
        """The number of steps of the whole run; None without its data."""
        return self.config.train.steps if self.data is None else self.data.num_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnMachine:
    """This machine, as a run on it finds it."""

    measure: Measure | None = None
    """The measurement of the machine, as in `machine_for`."""
    changed: Callable[[HardwareSpec], HardwareSpec] = lambda spec: spec
    """The function that changes its memory or its GPUs."""

    def is_cpu(self, config: Config) -> bool:
        """Return whether a CPU computes."""
        from megatrain.train.inputs import is_on_cpu

        return is_on_cpu(config)

    def spec(self, config: Config, lately: Lately) -> HardwareSpec:
        """Return the sizes and speeds of the machine."""
        from megatrain.train.planning.run_machine import choose_threads, machine_for

        choose_threads()
        return self.changed(machine_for(config, self.measure, lately))


class Reads(Enum):
    """The data that a plan looks at."""

    ALL = "those of the run, as the run does"
    HERE = "those that are on this machine, and can be tokenised"
    NONE = "none: the run is planned as one with enough of them"


def ask(
    raw: Mapping[str, Any],
    machine: HardwareSpec | OwnMachine,
    *,
    source: str,
    hf_config: Path | None = None,
    reads: Reads = Reads.HERE,
    point: ResumePoint = NEW_RUN,
    caller: Caller = NOBODY,
    beyond_context: bool = False,
) -> Asked:
    """Read the settings and the data to be planned, and count the model.

    Args:
        raw: The settings as nested keys; the data may be missing.
        machine: The machine; the batch is that of all of its GPUs.
        source: The origin of the settings, which is named in every problem.
        hf_config: A file like a model directory's config.json; None takes that of `model.path`.
        reads: The data that are looked at.
        point: The point from which the run resumes.
        caller: The folders that are kept between plans, and the function that shows progress.
        beyond_context: Whether rows may be longer than the model's context.

    Raises:
        ConfigError: A setting is wrong, or settings exclude each other.
        ModelError: The model cannot be planned.
        DataError: The data cannot be read.
    """
    place = str(hf_config) if hf_config is not None else _model_path(raw)
    raw = _with(raw, {"model.path": place, "data.path": _NO_DATA})
    given = config = build_config(raw, source=source)
    meta = point.record
    if meta is not None:
        config = as_begun(config, meta["config"])
    if point.committed is not None:
        from megatrain.train.resume.state_commits import laid_out_as

        config = laid_out_as(point.committed, config)
    scaling = config.model.rope_scaling
    model = PlannedModel(place, caller.counts, caller.progress, rope_scaling=scaling)
    if config.model.new_tokens:
        known = with_new_tokens(config, model)
        model = PlannedModel(place, None, caller.progress, known, rope_scaling=scaling)
    is_own = isinstance(machine, OwnMachine)
    on_cpu = machine.is_cpu(config) if isinstance(machine, OwnMachine) else not machine.has_accelerator
    rows = model.rows
    config = with_rows(config, context=rows.longest, on_cpu=on_cpu)
    if not beyond_context:
        check_row(config.data.seq_len, rows, is_set=scaling is not None)
    data, notes = None, []
    why_not = _why_no_data(config, reads)
    if why_not is None:
        caller.progress("reading and tokenising the data")
        from megatrain.train.run_data import read_data

        day = None if meta is None else meta["data"].get("day")
        data = read_data(
            config,
            model.config,
            checkpoint=point.checkpoint,
            folder=caller.prepared,
            day=day,
            on_cpu=on_cpu,
        )
        counts = None if config.model.new_tokens else caller.counts
        packed = data.packed
        model = PlannedModel(
            place, counts, caller.progress, model.config, packed.packing, packed.document_len, scaling
        )
    elif why_not:
        notes.append(f"{why_not}, so the run is planned as one with enough of them")
    config = with_step(config, on_cpu=on_cpu, num_rows=None) if data is None else data.config
    lately = Lately(caller.counts)
    spec = machine.spec(config, lately) if isinstance(machine, OwnMachine) else machine
    config = with_shards(config, spec.num_ranks, meta)
    began_s = time.perf_counter()
    compilable = _can_compile(config) if is_own else None

    def of_rank(config: Config, anatomy: Anatomy) -> Request:
        request = make_request(config, anatomy, spec, can_compile=compilable)
        return of_ranks(request, spec.num_ranks, spec.num_nodes, gathers=config.parallel.gathers)

    config, start = with_fastest_size(config, model, device_type(spec), of_rank)
    recount = partial(model.count, config, device_type(spec))
    anatomy = recount()
    if is_own and spec.is_cpu:
        from megatrain.train.planning.run_machine import with_layers_timed

        spec = with_layers_timed(spec, anatomy, model, config, lately)
    request = replace(make_request(config, anatomy, spec, can_compile=compilable), start=start)
    return Asked(
        request=request,
        given=given,
        config=config,
        model=place,
        recount=recount,
        count_s=time.perf_counter() - began_s,
        notes=(
            *_defaults_note(given, config),
            *_budget_note(request),
            *_base_note(config, model.quant_method),
            *_loading_note(place, model.quant_method, spec),
            *rows.notes(config.data.seq_len),
            *notes,
        ),
        data=data,
    )


def _why_no_data(config: Config, reads: Reads) -> str | None:
    """Return why the data are not looked at: None if they are, and empty if there are none."""
    paths = [source.path for source in config.data.sources]
    if paths == [_NO_DATA] or reads is Reads.NONE:
        return ""
    if reads is Reads.ALL:
        return None
    missing = [path for path in paths if not (Path(path).exists() or glob(path))]
    if missing:
        return f"data.path {missing[0]} is not on this machine"
    if config.data.tokenizer is None and config.model.init != "random" and not _has_tokenizer(config):
        return f"{config.model.path} comes without a tokenizer for the data (data.tokenizer names one)"
    return None


def _has_tokenizer(config: Config) -> bool:
    """Return whether the model comes with a tokenizer; a bare shape has none."""
    from megatrain.data.tokenizer import has_tokenizer

    return not Path(config.model.path).is_file() and has_tokenizer(config.model.path)


def _can_compile(config: Config) -> bool:
    from megatrain.hardware.accelerators import can_compile
    from megatrain.stream.lanes.devices import compute_device

    return can_compile(compute_device(config.train.device))


def with_new_tokens(config: Config, model: PlannedModel) -> PretrainedConfig:
    """Return the model's configuration with the words of its tokenizer and the new ones.

    Without a tokenizer, as with a bare shape, every word of the model counts as used.
    """
    from megatrain.data.tokenizer import new_tokens
    from megatrain.train.inputs import choose_tokenizer

    if config.data.tokenizer is not None or _has_tokenizer(config):
        choose_tokenizer(config, None, model.config)
    else:
        model.config.get_text_config().vocab_size += len(new_tokens(config.model.new_tokens))
    return model.config


def make_request(
    config: Config, anatomy: Anatomy, spec: HardwareSpec, *, can_compile: bool | None = None
) -> Request:
    """Return the planner's request for settings: given values are fixed, all others are free.

    Args:
        config: The settings of the run.
        anatomy: The anatomy of its model.
        spec: The machine.
        can_compile: Whether layers may be compiled there; None means that they may if it has an accelerator.

    Raises:
        ConfigError: There are more resident layers than the model has, or chunks of experts that stay whole.
    """
    if config.lora.base == AS_STORED:
        _require_one_rank(spec)
    drives, rated = spec.drives, config.hardware.rated_bytes_written
    if drives is not None and rated is not None:
        spec = replace(spec, drives=replace(drives, rated_bytes_written=float(rated)))
    return Request(
        spec=spec,
        anatomy=anatomy,
        batch=config.batch,
        clips=config.optim.max_grad_norm is not None,
        optimizer_name=config.optim.name,
        state=config.optim.state,
        commit_every=config.memory.commit_every if config.memory.commits else None,
        names_drives=bool(config.memory.drives),
        compiles=config.choice.is_compiled(
            config.train.compile, can_compile=spec.has_accelerator if can_compile is None else can_compile
        ),
        budget=config.activation_budget,
        fuses=config.model.kernels == "liger",
        deterministic=config.train.deterministic,
        device_limit=config.memory.device_budget,
        host_limit=config.memory.host_budget,
        choice=as_apart(config.choice.for_layers(len(anatomy.layers)), anatomy),
    )


def _require_one_rank(spec: HardwareSpec) -> None:
    """Refuse several ranks beside a base that is kept as stored.

    Raises:
        ConfigError: Several would train on the machine.
    """
    if spec.num_ranks > 1:
        raise ConfigError(
            f"lora.base is as_stored, which {spec.num_ranks} ranks cannot share; use one GPU (--gpus 1), or "
            "lora.base=dequantised"
        )


def planned_model(
    raw: Mapping[str, Any], *, source: str, hf_config: str | Path | None = None, caller: Caller = NOBODY
) -> PlannedModel:
    """Return the model of settings, as `ask` with the same arguments counts it.

    Raises:
        ConfigError: A setting is wrong, or no model is named.
    """
    place = str(hf_config) if hf_config is not None else _model_path(raw)
    config = build_config(_with(raw, {"model.path": place, "data.path": _NO_DATA}), source=source)
    return PlannedModel(place, caller.counts, caller.progress, rope_scaling=config.model.rope_scaling)


def _model_path(raw: Mapping[str, Any]) -> str:
    """Return the place of the model that settings name.

    Raises:
        ConfigError: They name none.
    """
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
    """Return settings with values for the keys that they lack."""
    missing = []
    for key, value in values.items():
        section, _, name = key.partition(".")
        inner = raw.get(section)
        if not isinstance(inner, Mapping) or name not in inner:
            missing.append((key, value))
    return set_keys(raw, missing)


def _budget_note(request: Request) -> list[str]:
    """Return a note on a budget of compiled layers where none are compiled."""
    if request.compiles or request.budget == ALL:
        return []
    return [f"train.activation_budget is {request.budget:g}, but layers are not compiled: it does nothing"]


def _base_note(config: Config, method: str | None) -> list[str]:
    """Return a note on a base that could stay in its codes, and is planned in values."""
    if config.lora.r is None or config.lora.base == AS_STORED or method not in ("mxfp4", "fp8"):
        return []
    return [
        f"the base comes in {method} and is planned in {config.train.precision}; lora.base=as_stored keeps "
        "it in its codes, in RAM and on the link, to the same bits"
    ]


def _loading_note(place: str, method: str | None, spec: HardwareSpec) -> list[str]:
    """Return a note on what is read of a model whose files are here and quantised."""
    if method is None:
        return []
    from megatrain.model.weights.files import checkpoint_files, has_weights

    if not has_weights(place):
        return []
    nbytes = sum(file.stat().st_size for file in checkpoint_files(place))
    drives = spec.drives
    taken = "" if drives is None else f", {nbytes / drives.read_bytes_per_s:.1f} s at the rate of its drives"
    return [f"loading reads {binary(nbytes)} of {method}{taken}, and decodes it tensor by tensor"]


def _defaults_note(given: Config, config: Config) -> list[str]:
    """Return a note on the open settings that decide the numbers, without those that follow from others."""
    train = given.train
    keys = ["train.precision", "data.seq_len"]
    if AUTO in (train.micro_batch_size, train.grad_accumulation):
        keys.append("train.tokens_per_step")
    if train.grad_accumulation == AUTO:
        keys.append("train.micro_batch_size")
    if config.activation_budget != ALL:
        keys.append("train.activation_budget")
    then, now = (each.model_dump(mode="json") for each in (given, config))
    chosen = [
        f"{key}={now[section][name]}"
        for key in keys
        for section, _, name in [key.partition(".")]
        if then[section][name] == AUTO
    ]
    return [f"not given, so taken as {', '.join(chosen)}"] if chosen else []
