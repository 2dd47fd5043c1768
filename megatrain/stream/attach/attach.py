"""`megatrain.attach`: check that a model fits, move its state to the host, and put an engine under it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatrain.config.budgets import ALL, require_budget, require_compile
from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.config.read_choice import as_values, from_values, read_choice
from megatrain.config.sizes import parse_limit
from megatrain.errors import ConfigError, ModelError
from megatrain.hardware.accelerators import can_compile
from megatrain.hardware.determinism import set_environment
from megatrain.hardware.environment import warn_of_unset
from megatrain.model.blocks import find_blocks
from megatrain.model.sequence.check import refuse_config, refuse_model
from megatrain.model.sequence.range import OF_LOAD, check_row, row_range
from megatrain.model.torch_state import RandomState
from megatrain.store.placement import Tiers
from megatrain.stream.attach.bind import bind, plan_layouts
from megatrain.stream.attach.resolve import Conditions, resolve
from megatrain.stream.choice_checks import (
    check_choice,
    check_runs,
    refuse_on_drives,
    require_drives,
    say_what_runs_twice,
    uncompiled,
)
from megatrain.stream.engine import Engine
from megatrain.stream.forward.arrangement import residents_of
from megatrain.stream.forward.compiled import Compiler, say_how
from megatrain.stream.job.job import Job
from megatrain.stream.job.ranks import Ranks
from megatrain.stream.lanes import Lanes
from megatrain.stream.lanes.devices import make_lanes
from megatrain.stream.memory import require_device_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedModel

_SETTINGS = "_megatrain_settings"


def attach(
    model: PreTrainedModel,
    choice: Choice | None = None,
    *,
    device: str | torch.device | Lanes = "cpu",
    precision: str = "fp32",
    batch: StepBatch | None = None,
    micro_batch_size: int | None = None,
    compile: str = "auto",
    activation_budget: float = ALL,
    optimizer: str = DEFAULT.name,
    optimizer_state: str = DEFAULT.state,
    host_limit: int | str | None = None,
    device_limit: int | str | None = None,
    tiers: Tiers | None = None,
    deterministic: bool = False,
    ranks: Ranks | None = None,
    **fields: Any,
) -> Engine:
    """Make a model train by streaming, in place; `engine.detach()` undoes it.

    Where bytes are and when they move is a `Choice`, which changes no bit of the result. What it leaves open
    is planned for this model, this machine and `batch`; with nothing given, that is everything.

    Args:
        model: A Hugging Face causal LM on the CPU, or one from `megatrain.load`.
        choice: The choice as far as it is decided; None: what `fields` say. One in which nothing is open is
            obeyed as it is.
        device: The device on which to compute: `cpu`, `cuda`, `cuda:N`, `xpu`, `auto`, or, for tests,
            `emulated` and `checked`.
        precision: The precision of the weights: `fp32`, or `bf16`, which means bf16 weights that are the
            upper half of exact fp32 masters.
        batch: The batch that a step trains on, for the plan and the check of memory. None: rows of 4,096
            tokens, or of the model's context, and 131,072 tokens per step; on a CPU 1,024 and 8,192.
        micro_batch_size: The number of rows of the micro-batches into which a larger batch of
            `model(**batch)` is split; they run in lockstep. None: no batch is split.
        compile: The setting by which each layer (or fragment) runs through `torch.compile`, one compilation
            for all of a kind: `on`, `off`, or `auto`, which is on accelerators where torch has a compiler for
            them. That is done in the first step, which takes about a minute longer. Compiled kernels round
            differently; what is exact is that streaming, recomputation and resuming give the bits of the same
            compiled layers. It is off under `activations` that keep the results of single operations.
        activation_budget: The share of what compiled layers would keep for their backward that they may keep,
            one of `megatrain.config.budgets.BUDGETS`. It changes the last bits of results.
        optimizer: The optimizer that will train, for whose state memory is planned: see
            `engine.make_optimizer`.
        optimizer_state: The format in which its state will be kept. AdamW's moments are kept in `fp32`, or in
            `bf16` or `int8`, which are not exact.
        host_limit: The host memory that the state may take, in bytes or as `64GiB`; None: what the machine
            and its cgroups give.
        device_limit: The device memory for slots, resident blocks and gradients; None: what there is.
        tiers: The tiers: what of the state does not fit into `tiers.ram`, which then takes the place of
            `host_limit`, goes to drives, and no block is resident then. Give `megatrain.load` the same. None:
            nothing goes to drives.
        deterministic: A request for the same bits in every run on the same device. This is
            `torch.use_deterministic_algorithms`, for the whole process, until the engine is detached;
            attention is not cuDNN's then, and an operation that has no such form is a ModelError.
        ranks: The processes that train together; each gives the engine its own micro-batches, in the order of
            ranks, and they keep one state. `batch` is that of all; with its `sequence`, so many neighbours
            give the same micro-batches, whole, and share out their tokens. None: this one is alone.
        **fields: The fields of `Choice` by name, such as `num_slots=2` or `activations="recompute"`. With
            `lockstep` above 1 and without seeds, each micro-batch draws its dropout from a seed of its own,
            since they take turns.

    Raises:
        ModelError: The model cannot be streamed exactly.
        CapacityError: The state does not fit into host or device memory; nothing was allocated.
        ConfigError: An unknown keyword, a value out of range, two that exclude each other, or rows of `batch`
            that are longer than the model takes.
    """
    settings = {name: value for name, value in locals().items() if name not in ("model", "fields")}
    settings["choice"] = choice = read_choice(choice, fields)
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ConfigError(f"micro_batch_size is {micro_batch_size}; use 1 or more")
    require_compile(compile)
    require_budget(activation_budget)
    if tiers is None:
        require_drives(choice)
    if tiers is None and "nvme" in dict(choice.given.get("tiers", ())).values():
        raise ConfigError(
            "the choice puts planes on drives (tiers), but there are no drives; give attach "
            "tiers=megatrain.Tiers(nvme=[DIRECTORY, ...])"
        )
    if batch is not None:
        check_row(batch.seq_len, row_range(model.config), named="batch.seq_len {seq_len}", extends=OF_LOAD)
    sequence = 1 if batch is None else batch.sequence
    if sequence > 1:
        refuse_config(model.config, sequence)
        compile = uncompiled(compile, sequence)
    choice, job = Job.read(
        choice,
        precision=precision,
        batch=batch,
        optimizer=optimizer,
        optimizer_state=optimizer_state,
        host_limit=host_limit,
        tiers=tiers,
        ranks=ranks,
    )
    if getattr(model, "_megatrain_engine", None) is not None:
        raise ModelError("the model is attached to an engine already; call engine.detach() first")
    device_bytes = parse_limit(device_limit, "device_limit")
    if job.tiers is not None:
        _refuse_beside_drives(choice, job.optimizer)
    lanes = make_lanes(device, device_bytes)
    warn_of_unset(lanes.device)
    if deterministic:
        set_environment(lanes.device)
    compiles = choice.is_compiled(compile, can_compile=can_compile(lanes.device))
    decided = choice.given
    given = Conditions(
        lanes=lanes, job=job, compiles=compiles, budget=activation_budget, deterministic=deterministic
    )
    choice, planned_tokens = resolve(model, choice, given)
    # each rank has planned by what it has found free; what it was told stays, to be compared
    planned = from_values(job.ranks.gather_values(as_values(choice))[0])
    choice = replace(planned, **{name: getattr(choice, name) for name in decided})
    job = job.as_chosen(choice)
    blocks = find_blocks(model, **choice.split)
    check_choice(choice, blocks, compiles=compiles)
    check_runs(choice, job.runs.number)
    say_what_runs_twice(model, choice, lanes.device, job.precision)
    say_how(compile, lanes.device, compiles=compiles, budget=activation_budget)
    residents = residents_of(choice, blocks)
    layouts = plan_layouts(model, blocks, job.precision)
    require_device_memory(blocks, layouts, lanes, choice, residents, job)
    binding = bind(model, blocks, layouts, choice, job)
    engine = Engine(
        model,
        binding,
        lanes,
        choice,
        micro_batch_size=micro_batch_size,
        compiler=Compiler(budget=activation_budget) if compiles else None,
        deterministic=deterministic,
    )
    engine.together.take_room(job.batch, planned_tokens)
    model.__dict__[_SETTINGS] = settings
    if sequence > 1:
        try:
            _check_shards(engine, sequence)
        except BaseException:
            engine.detach()
            raise
    return engine


def _check_shards(engine: Engine, number: int) -> None:
    """Refuse a model that computes something else where rows are shared out, as `refuse_model`."""
    model, device = engine.model, engine.lanes.device

    def run(batch: Mapping[str, Any]) -> Any:
        with torch.no_grad():
            return model(**batch, return_dict=True)

    was_training = model.training
    model.train()
    try:
        refuse_model(model, number, run, lambda: RandomState(device))
    finally:
        model.train(was_training)


def reattach(engine: Engine, change: Callable[[PreTrainedModel], object]) -> Engine:
    """Change a model that is attached, such as by adding PEFT's adapters to it, and attach it again.

    What has been trained stays; the optimizer of the old engine does not, so make one of the new engine.
    While the weights move into their new places, host memory holds them twice.

    Args:
        engine: The engine of the model; it is detached.
        change: The function that is given the model, as it was before `attach`, and changes it:
            `lambda model: get_peft_model(model, config)`.

    Returns:
        The engine of the changed model, with the settings that the model was attached with.

    Raises:
        ConfigError: The engine was given lanes of the caller's, which end with it.
        MegatrainError: `attach` refuses the changed model, which is then detached.
    """
    engine.require_attached()
    model = engine.model
    settings = model.__dict__.pop(_SETTINGS)
    if isinstance(settings["device"], Lanes):
        raise ConfigError(
            "reattach needs a device by its name; detach, change the model, and attach it again"
        )
    engine.detach()
    change(model)
    return attach(model, **settings)


def _refuse_beside_drives(choice: Choice, optimizer: Optimizer) -> None:
    """Refuse what state on drives rules out.

    Raises:
        ConfigError: A resident block, or an optimizer whose state does not go there.
    """
    given = choice.given
    if given.get("resident_layers") or given.get("outer_resident"):
        raise ConfigError(
            f"resident_layers (memory.resident_blocks) is {choice.resident_layers} and outer_resident is "
            f"{choice.outer_resident}, but the state is on drives, from where no block goes to the device "
            "for good; use 0 and False, or no drives"
        )
    refuse_on_drives(optimizer)
