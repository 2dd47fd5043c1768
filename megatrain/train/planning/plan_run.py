"""From settings and a machine to a plan: what `megatrain plan` asks, before a byte is allocated.

A setting that the user has not given, or given as `auto`, is free: the planner chooses it. The data are not
looked at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config, build_config, set_keys
from megatrain.config.choice import AUTO
from megatrain.config.decided import with_rows, with_step
from megatrain.config.plan import Plan
from megatrain.config.runs import num_places
from megatrain.data.context import check_seq_len
from megatrain.errors import ConfigError
from megatrain.hardware import GIB, HardwareSpec
from megatrain.model.profile.anatomy import Anatomy
from megatrain.plan.cost.deterministic import copies_of_gradient, filled_share, is_priced
from megatrain.plan.cost.passes import Passes
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.remedies import Remedy, advise
from megatrain.plan.search.request import Request
from megatrain.plan.search.verdict import Verdict, judge
from megatrain.plan.search.wear import spare_drives
from megatrain.train.planning.counting import PlannedModel, Progress
from megatrain.train.planning.gpus import of_ranks
from megatrain.train.planning.micro_batches import with_fastest_size
from megatrain.train.records.metrics import format_count

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NO_DATA = "not needed for a plan"
_TOKENS = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan, what it was asked for, and what should be said with it."""

    plan: Plan
    request: Request
    config: Config
    model: str
    """As it was given."""
    count_s: float
    """Seconds that counting the model took, and timing its layers on a CPU, beside `plan.plan_s`."""
    tokens: int = 0
    """That the run still trains on, by which its days and the wear of drives are counted."""
    verdict: Verdict
    remedies: tuple[Remedy, ...] = ()
    """What would make it fit, if it does not."""
    spares: tuple[str, ...] = ()
    """What would spare the drives, if it wears them out soon, each with the days that it gives."""
    notes: tuple[str, ...] = ()

    def evaluation_s(self, num_micro_batches: int) -> float:
        """Return the seconds in which so many micro-batches pass without gradients."""
        step = self.request.step(self.plan.choice)
        return Passes(step, self.plan.together).seconds(num_micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is asked of the planner, before anything is planned."""

    request: Request
    config: Config
    model: str
    recount: Callable[..., Anatomy]
    count_s: float
    notes: tuple[str, ...]


def ask(
    raw: Mapping[str, Any],
    spec: HardwareSpec,
    *,
    source: str,
    hf_config: Path | None = None,
    counts: Path | None = None,
    progress: Progress = lambda doing: None,
) -> Asked:
    """Read what is to be planned, and count the model.

    Args:
        raw: Settings as nested keys; the data may be missing.
        spec: The machine; the batch is that of all of its GPUs.
        source: Where the settings are from, named in every problem.
        hf_config: A file like a model directory's config.json; None: that of `model.path`.
        counts: A folder in which counts of models are kept; None: the model is counted anew.
        progress: Is told what takes time, before it begins.

    Raises:
        ConfigError: A setting that is wrong, or settings that exclude each other.
        ModelError: A model that cannot be planned.
    """
    place = str(hf_config) if hf_config is not None else _model_path(raw)
    raw = _with(raw, {"model.path": place, "data.path": _NO_DATA})
    model = PlannedModel(place, counts, progress)
    given = config = build_config(raw, source=source)
    if config.model.new_tokens:
        model = PlannedModel(place, None, progress, with_new_tokens(config, model))
    on_cpu = not spec.has_accelerator
    config = with_rows(config, context=model.context, on_cpu=on_cpu)
    check_seq_len(config.data.seq_len, model.context)
    config = with_step(config, on_cpu=on_cpu, num_rows=None)
    if config.parallel.shards is None:
        shards = num_places(spec.num_ranks, config.parallel.sequence)
        parallel = config.parallel.model_copy(update={"shards": shards})
        config = config.model_copy(update={"parallel": parallel})
    began_s = time.perf_counter()

    def of_rank(config: Config, anatomy: Anatomy) -> Request:
        request = make_request(config, anatomy, spec)
        return of_ranks(request, spec.num_ranks, spec.num_nodes, gathers=config.parallel.gathers)

    config = with_fastest_size(config, model, device_type(spec), of_rank)
    recount = partial(model.count, config, device_type(spec))
    anatomy = recount()
    return Asked(
        request=make_request(config, anatomy, spec),
        config=config,
        model=place,
        recount=recount,
        count_s=time.perf_counter() - began_s,
        notes=tuple(_defaults_note(given, config)),
    )


def plan_run(
    raw: Mapping[str, Any],
    spec: HardwareSpec,
    *,
    tokens: int | None = None,
    progress: Progress = lambda doing: None,
    **given: Any,
) -> Planned:
    """Plan a run, of which every GPU of the machine is a rank; other arguments and errors are those of `ask`.

    Args:
        raw: As in `ask`.
        spec: As in `ask`.
        tokens: To train on; None: those of the run, or 1e9 if it has no steps.
        progress: As in `ask`.
        given: Other arguments of `ask`.
    """
    asked = ask(raw, spec, progress=progress, **given)
    gathers = asked.config.parallel.gathers
    request = of_ranks(asked.request, spec.num_ranks, spec.num_nodes, gathers=gathers)
    progress("searching choices")
    plan = make_plan(request)
    if tokens is None:
        tokens = (asked.config.train.steps or 0) * asked.config.train.tokens_per_step or _TOKENS
    remedies: list[Remedy] = []
    spares: tuple[str, ...] = ()
    if not plan.fits:
        progress("looking for what would make it fit")
        remedies = advise(request, asked.recount)
    verdict = judge(request, plan, tokens=tokens, progress=progress)
    if plan.fits and plan.bytes_per_step["drive_written"]:
        progress("looking for what would spare the drives")
        spares = tuple(spare_drives(request, plan, tokens=tokens))
    return Planned(
        plan=plan,
        request=request,
        config=asked.config,
        model=asked.model,
        tokens=tokens,
        verdict=verdict,
        remedies=tuple(remedies),
        spares=spares,
        notes=(*asked.notes, *_notes(request)),
        count_s=asked.count_s,
    )


def with_new_tokens(config: Config, model: PlannedModel) -> PretrainedConfig:
    """Return the model's configuration with the words of its tokenizer, and the new ones.

    Without a tokenizer, as of a shape alone, every word that the model has is taken for used.
    """
    from megatrain.data.tokenizer import has_tokenizer, new_tokens
    from megatrain.train.inputs import choose_tokenizer

    is_shape = Path(config.model.path).is_file() or not has_tokenizer(config.model.path)
    if config.data.tokenizer is not None or not is_shape:
        choose_tokenizer(config, None, model.config)
    else:
        model.config.get_text_config().vocab_size += len(new_tokens(config.model.new_tokens))
    return model.config


def make_request(
    config: Config, anatomy: Anatomy, spec: HardwareSpec, *, can_compile: bool | None = None
) -> Request:
    """Return what settings ask of the planner: what is given is fixed, all else is free.

    Args:
        config: Of the run.
        anatomy: Of its model.
        spec: Of the machine.
        can_compile: Layers may be compiled there; None: if it has an accelerator.

    Raises:
        ConfigError: More resident layers than the model has.
    """
    drives, rated = spec.drives, config.hardware.rated_bytes_written
    if drives is not None and rated is not None:
        spec = replace(spec, drives=replace(drives, rated_bytes_written=float(rated)))
    return Request(
        spec=spec,
        anatomy=anatomy,
        batch=config.batch,
        clips=config.optim.max_grad_norm is not None,
        state=config.optim.state,
        commit_every=config.memory.commit_every if config.memory.commits else None,
        names_drives=bool(config.memory.drives),
        compiles=config.choice.is_compiled(
            config.train.compile, can_compile=spec.has_accelerator if can_compile is None else can_compile
        ),
        fuses=config.model.kernels == "liger",
        deterministic=config.train.deterministic,
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


def _defaults_note(given: Config, config: Config) -> list[str]:
    """Say what was left open of what decides the numbers, and is decided; not what follows from the rest."""
    train = given.train
    keys = ["train.precision", "data.seq_len"]
    if AUTO in (train.micro_batch_size, train.grad_accumulation):
        keys.append("train.tokens_per_step")
    if train.grad_accumulation == AUTO:
        keys.append("train.micro_batch_size")
    then, now = (each.model_dump(mode="json") for each in (given, config))
    chosen = [
        f"{key}={now[section][name]}"
        for key in keys
        for section, _, name in [key.partition(".")]
        if then[section][name] == AUTO
    ]
    return [f"not given, so taken as {', '.join(chosen)}"] if chosen else []


def device_type(spec: HardwareSpec) -> str:
    """Return whose kernels run: an emulated accelerator computes on the CPU."""
    return "accelerator" if spec.has_accelerator else "cpu"


def _notes(request: Request) -> list[str]:
    anatomy, spec = request.anatomy, request.spec
    notes = []
    if anatomy.part:
        tower = sum(f.num_params for layer in anatomy.layers for f in layer.fragments)
        tower += sum(part.num_params for part in anatomy.outer)
        notes.append(
            f"planned for the {anatomy.part}: {format_count(tower)} of the model's "
            f"{format_count(anatomy.num_params)} parameters"
        )
    if anatomy.num_active_params < 0.98 * anatomy.num_params and not anatomy.part:
        notes.append(
            f"a token passes {format_count(anatomy.num_active_params)} of {format_count(anatomy.num_params)} "
            "parameters; the model's experts are counted as evenly used, and all of them stream and update"
        )
    notes += rates_note(spec, anatomy.precision)
    if request.deterministic and spec.has_accelerator and anatomy.num_heads:
        notes.append(_deterministic_note(request))
    if request.state != "fp32":
        notes.append(f"moments in {request.state} are not exact: the result differs from AdamW's")
    return notes


def rates_note(spec: HardwareSpec, precision: str) -> list[str]:
    """Say what is behind the rates of a machine, if it is less than a measurement."""
    source = spec.sources.get("matmul_flops_per_s", "")
    if source.startswith("measured"):
        return []
    measure = "on the machine itself, megatrain doctor --bench measures them"
    if source.startswith(f"{precision}: fitted"):
        return [
            f"of the rates of {spec.name}, that of {precision} products is fitted to another system's "
            f"published run, and all others are vendors' or assumed: megatrain has not run there; {measure}"
        ]
    return [
        f"nobody has measured the rates of {spec.name}, and no published run backs them: they are vendors' "
        f"figures, or assumed; {measure}"
    ]


def _deterministic_note(request: Request) -> str:
    """Say what results that are the same in every run cost in attention."""
    anatomy, spec = request.anatomy, request.spec
    if anatomy.precision != "bf16" or not is_priced(spec, request.heads):
        return (
            f"train.deterministic=true: what attention loses by it on {spec.name} in {anatomy.precision} is "
            "not known, and not in these times"
        )
    assert spec.multiprocessors is not None
    share = spec.flash2_share * filled_share(spec.multiprocessors, request.heads)
    copies = copies_of_gradient(spec.multiprocessors, request.heads)
    nbytes = 4 * copies * anatomy.tokens * request.batch.sequence * anatomy.num_heads * anatomy.head_dim
    return (
        f"train.deterministic=true: attention's forward at {spec.flash2_share:.0%} and its backward at "
        f"{share:.0%} of their rates are in these times; {copies} copies of a gradient, {nbytes / GIB:.2f} "
        "GiB on the device in the backward of a layer, are not in the pools"
    )
