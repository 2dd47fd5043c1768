"""Every setting a user has, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from megatrain.config.adaptation import AS_STORED, Adaptation
from megatrain.config.budgets import ALL
from megatrain.config.choice import (
    AUTO,
    BOUNDARIES,
    GRADIENTS,
    KEYS,
    SUMS,
    WITHOUT_DRIVES,
    Choice,
    StepBatch,
    Updates,
)
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT, OPTIMIZERS, STATES, find
from megatrain.config.policies import POLICIES
from megatrain.config.rope import KIND, read_rope_scaling
from megatrain.config.sections.data import DataConfig
from megatrain.config.sections.eval import EvalConfig, eval_conflicts
from megatrain.config.sections.log import LogConfig
from megatrain.config.sections.lora import LoraConfig
from megatrain.config.sections.parallel import ParallelConfig, cut_problems
from megatrain.config.sections.preference import PreferenceConfig
from megatrain.config.sections.section import Section
from megatrain.config.sections.train import TrainConfig
from megatrain.config.types import (
    Betas,
    Bytes,
    Count,
    LocalPath,
    Name,
    Paths,
    Patterns,
    Rate,
    SaveEvery,
    Schedule,
    Steps,
    Watch,
    as_tuple,
    one_of,
    reads_as,
)
from megatrain.errors import ConfigError
from megatrain.objective.objective import Objective
from megatrain.objective.registry import OBJECTIVES


def _rope_scaling(value: object) -> object:
    """Check the mapping as a whole, so that one problem is reported once."""
    try:
        return None if value is None else read_rope_scaling(value)
    except ConfigError as error:
        raise PydanticCustomError("said", "{text}", {"text": str(error)}) from error


class ModelConfig(Section):
    """What is trained."""

    path: LocalPath
    """Hugging Face causal LM: a directory with `config.json` and safetensors, or a hub id."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` reads the weights; `random` pre-trains from the directory's `config.json` alone."""
    new_tokens: Annotated[
        tuple[Name, ...] | LocalPath,
        BeforeValidator(as_tuple),
        reads_as("a list of tokens, or a text file with one on each line"),
    ] = ()
    """Tokens that the tokenizer gets, such as `["<think>", "</think>"]`. Where embedding and head have too
    few rows for them they get more, which begin as the mean of the others; with `lora.r` both are trained."""
    attn_implementation: Name | None = None
    """Attention by its transformers name, such as `sdpa` or `eager`; `varlen` (accelerators) and
    `sdpa_by_document` (CPU) make no mask of packed rows, and `tiled` makes none of any rows. null = `varlen`
    on accelerators where it can be, `tiled` elsewhere for rows of more than 16,384 tokens where it can be,
    else transformers chooses."""
    rope_scaling: Annotated[dict[str, Any] | None, BeforeValidator(_rope_scaling), reads_as(KIND)] = None
    """Scaling of the rotary embeddings, for rows beyond the model's context, with transformers' parameters:
    `rope_type: yarn` or `linear`, and by how many times the context becomes longer (`factor`). It is written
    into the model's `config.json`. null = as the model has it."""
    kernels: Literal["auto", "liger", "torch"] = "auto"
    """Kernels of norms, rotary embeddings and activations: `liger` takes those of the `gpu` extra, `torch`
    the model's own. `auto` = `torch`, until the others have been measured."""


class OptimConfig(Section):
    """The optimizer and its learning rate."""

    lr: Rate = 5e-5
    """Peak learning rate. About 1e-5 to 5e-5 suits fine-tuning, 3e-4 to 1e-3 pre-training a small model."""
    betas: Betas = (0.9, 0.95)
    """Decay of the running averages: of the gradient, and of its square. An optimizer with one average takes
    the first."""
    eps: Rate = 1e-8
    """Added to the denominator of AdamW's update; other optimizers have none."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Decoupled weight decay."""
    no_decay: Patterns | None = None
    """Shell patterns of the parameter names without weight decay. null = biases and norms; [] = none."""
    max_grad_norm: Rate | None = 1.0
    """Clip the gradient's global norm to this. null = off."""
    updates: Annotated[str, one_of("auto", *(schedule.value for schedule in Updates))] = "deferred"
    """When updates run: behind the next step's forward (`deferred`), as soon as each gradient is complete
    (`immediate`; no clipping, and no skipping of a step that is not finite), or before the step ends
    (`serial`). The numbers are the same. `auto` = `deferred`, or `immediate` where it is faster and nothing
    is clipped."""
    name: Annotated[str, one_of(*OPTIMIZERS)] = DEFAULT.name
    """The optimizer that trains: what each keeps and computes is in docs/training.md."""
    state: Annotated[str, one_of(*STATES)] = DEFAULT.state
    """The format of the optimizer's state. Of AdamW's two moments `fp32` is exact: 12 bytes per parameter
    in all. Not exact: `bf16` (stochastic rounding; 8 bytes) and `int8` (block-wise codes; 6.03 bytes). Other
    optimizers have formats of their own."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule by its transformers name."""
    warmup_steps: Steps = 0
    """Steps over which the learning rate rises from 0; below 1, a share of all steps, such as 0.03."""
    schedule_args: dict[str, Any] = Field(default={})
    """Further arguments of the schedule, such as `{min_lr_rate: 0.1}` for `cosine_with_min_lr`."""
    max_skipped_steps: Count = 10
    """Stop (exit code 5) after this many steps in a row that were skipped: for a gradient norm that is not
    finite, or as `train.on_spike` says."""


_TIERS = "auto or a mapping of device and ram (sizes such as 20GiB) and nvme (directories on drives)"


class TiersConfig(Section):
    """What the state may take of the device, of RAM and of drives."""

    device: Bytes | None = None
    ram: Bytes | None = None
    nvme: Paths | None = None


def _tiers(value: object) -> object:
    """Check the mapping as a whole, so that one problem is reported once; nothing means `auto`."""
    if value is None or value == "auto":
        return "auto"
    if not isinstance(value, (Mapping, TiersConfig)):
        raise ValueError(_TIERS)
    try:
        return TiersConfig.model_validate(value)
    except ValidationError as error:
        raise ValueError(_TIERS) from error


_STAYS = ", ".join(f"{policy.stays} (`{policy.name}`)" for policy in POLICIES.values())
_ACTIVATIONS = f"What stays of a layer until its backward: {_STAYS}. `auto` = for each layer what is fastest."


class MemoryConfig(Section):
    """These settings say where memory goes. What is not given is planned; `memory: auto` plans all."""

    num_slots: Count | None = None
    """Device buffers of one block each. null = as planned: 2 or more overlap copies with compute."""
    activations: Annotated[str, one_of("auto", *POLICIES), Field(description=_ACTIVATIONS)] = "auto"
    boundaries: Annotated[str, one_of("auto", *BOUNDARIES)] = "auto"
    """The place where inputs of recomputed layers wait for the backward, and what
    `keep_attention` keeps. `nvme` = on the drives of
    `memory.tiers`, where then also goes what `activations: offload` saves."""
    fragments: bool | Literal["auto"] = "auto"
    """Stream each layer in parts (attention; mlp or experts), through buffers as large as a part."""
    expert_chunks: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Stream the experts of a layer in at most so many chunks of whole experts: no more than a few chunks are
    on the device, and all micro-batches of a round pass one before the next comes. Of such layers the
    attention is compiled. `1` = experts are a part of their layer like any other, which `lora.base=as_stored`
    asks for."""
    resident_blocks: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """First layers that stay on the device with all their state. `auto` = as planned; none on a CPU."""
    mirror_resident: bool | Literal["auto"] = "auto"
    """Keep room in RAM for the state of layers that stay on the device too. `false` = it is on the device
    alone, which adds the device's memory to the host's, and checkpoints are written from there; `auto` =
    `true` where RAM has the room and steps are no faster without."""
    lockstep: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Micro-batches that pass each layer together, so that it is copied once for all. `auto` = as planned."""
    gradients: Annotated[str, one_of(*GRADIENTS, "auto")] = "auto"
    """The place where complete gradients wait for the norm, in a run that clips. `device` = in spare device
    memory, and `nvme` = on the drives of `memory.tiers`, which saves the host 2 bytes per parameter; `auto` =
    for each layer as planned: in RAM, then in spare device memory, and on drives what fits into neither."""
    sums: Annotated[str, one_of(*SUMS, "auto")] = "auto"
    """The place where gradients add up over the rounds of a step (`memory.lockstep` micro-batches each).
    `device` = the fp32 sum so far is copied there and back; `host` = each gradient after the first round is
    copied home by itself, and the host adds it: fewer bytes on the link, more work for the host, the same
    bits. `nvme` = as `device`, but the sums wait on the drives of `memory.tiers` in between, which in bf16
    saves the host 4 bytes per parameter, and writes and reads as many in each round but the last."""
    num_gradient_buffers: Count | None = None
    """Device buffers in which a streamed layer's gradient adds up. null = as planned."""
    head_chunk_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens per chunk of head and loss. 0 = chosen from the vocabulary size; small batches are one chunk."""
    host_limit: Bytes | None = None
    """Host memory the run may take. null = what the machine or container has, of which the smaller of 8 GiB
    and 5 % stays free."""
    device_limit: Bytes | None = None
    """Device memory the run may take. null = what the device has."""
    tiers: Annotated[TiersConfig | Literal["auto"], BeforeValidator(_tiers), reads_as(_TIERS)] = "auto"
    """`{device: 20GiB, ram: 64GiB, nvme: [/mnt/a, /mnt/b]}`: state that does not fit into `ram` goes to the
    drives of `nvme`, and no layer stays on the device if any does; `device` and `ram` are the two limits
    above. `auto` = no drives."""
    commit_every: Count | None = 1
    """Steps between commits of state on drives: a crash goes back to the last one. Each writes the weights,
    2 bytes per parameter more, and all that lives in RAM. null = never, so back to the newest checkpoint;
    the drives then hold only what RAM does not."""
    accept_wear: bool = False
    """Start a run though it will use up the rated endurance of its drives before it ends. false = such a run
    does not start (exit code 9), and what would spare the drives is said."""
    watch: Watch = "auto"
    """The share of the state in RAM that is watched at any moment for values that change by themselves: the
    parts take turns, and frozen weights are all compared in turn. A change stops the run with exit code 10.
    `auto` = as much as 1 % of a step's time allows, which the plan states."""
    on_mismatch: Literal["warn", "stop"] = "warn"
    """The action if the first step has allocated other bytes than planned: go on with a warning, or stop."""

    @property
    def drives(self) -> tuple[str, ...]:
        """The directories on drives that the run may use."""
        return () if self.tiers == "auto" else tuple(self.tiers.nvme or ())

    @property
    def commits(self) -> bool:
        """Whether all of the state is committed there, wherever it lives."""
        return bool(self.drives) and self.commit_every is not None

    @property
    def host_budget(self) -> int | None:
        """The bytes of RAM that the run may take, by either name."""
        return self.host_limit if self.tiers == "auto" or self.tiers.ram is None else self.tiers.ram

    @property
    def device_budget(self) -> int | None:
        """The bytes of the device that the run may take, by either name."""
        return self.device_limit if self.tiers == "auto" or self.tiers.device is None else self.tiers.device


class CheckpointConfig(Section):
    """Checkpoints and resuming."""

    every: SaveEvery | None = "auto"
    """Steps between checkpoints, or a time such as `30min` or `2h`; `epoch` = after each pass over the data,
    `epoch/4` = four times in each. `auto` = the shortest time, 10 minutes or more, in which saving takes 2 %
    of the run at most. null = only at the end, or when stopped by a signal."""
    keep_last: Count | None = 2
    """Newest checkpoints to keep, and beside them what `eval.keep_best` says and, after skipped steps, the
    newest from before the first of them, until the run is healthy again. null = all."""
    background: bool = True
    """Training goes on while a checkpoint is written: each block is copied before its next update. false =
    steps wait until it is on the disk. So they do where several nodes do not share the run's directory."""
    buffer: Annotated[Bytes, Field(ge=64 * 2**20, le=8 * 2**30)] = 512 * 2**20
    """Host memory through which a checkpoint is written in the background, 64MiB to 8GiB, but no more than
    half of what the run leaves. An update waits for the disk where it is full."""
    resume: Name = "auto"
    """`auto` continues from the newest whole checkpoint in `out`, `no` refuses to, a path names one."""


class HardwareConfig(Section):
    """These settings describe the machine; megatrain changes nothing of it."""

    power_cap: Rate | None = None
    """Watts that the device should take at most. A run compares the device's limit with it and says which
    command sets it. null = no wish."""
    rated_bytes_written: Bytes | None = None
    """Endurance of all drives that the run writes to (TBW of their datasheet). A run that would use it up
    does not start (`memory.accept_wear`), and one that has written a tenth of it says so. null = as the
    machine file of a plan says, or not known."""


class Config(Section):
    """One training run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    preference: PreferenceConfig = PreferenceConfig()
    lora: LoraConfig = LoraConfig()
    optim: OptimConfig = OptimConfig()
    memory: MemoryConfig = MemoryConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    hardware: HardwareConfig = HardwareConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    out: LocalPath = "runs/train"
    """Run directory: settings, plan, metrics, events, report, `checkpoints/` and the model in `hf/`."""

    @property
    def choice(self) -> Choice:
        """The choice in `memory` and `optim`; all else is open, for the planner."""
        values = {field: getattr(getattr(self, section), name) for field, (section, name) in _FIELDS.items()}
        if self.lora.base == AS_STORED:  # codes are at home in RAM
            values["mirror_resident"] = True
        return Choice(
            **{field: AUTO if value is None else value for field, value in values.items()},
            head_chunk_tokens=self.memory.head_chunk_tokens or AUTO,
        )

    @property
    def objective(self) -> Objective:
        """The objective of the run."""
        return OBJECTIVES[self.train.loss]

    @property
    def adaptation(self) -> Adaptation | None:
        """The trained part of the model; None means all of it."""
        lora, freeze, only = self.lora.chosen, self.train.freeze, self.train.only
        if lora is not None and self.model.new_tokens:
            lora = replace(lora, trains_embeddings=True)
        if not (lora or freeze or only):
            return None
        return Adaptation(lora=lora, freeze=freeze, only=only, base=self.lora.base)

    @property
    def row_tokens(self) -> int:
        """The number of tokens of a row, of both of its sequences where it has two."""
        return self.data.seq_len * self.rows_each

    @property
    def rows_per_step(self) -> int:
        """The number of rows of one optimizer step."""
        return self.train.tokens_per_step // self.row_tokens

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, with its state in the format that is set."""
        return find(self.optim.name, self.optim.state)

    @property
    def activation_budget(self) -> float:
        """The budget of compiled layers: all that they would keep, where it is left open."""
        return ALL if self.train.activation_budget == AUTO else self.train.activation_budget

    @property
    def batch(self) -> StepBatch:
        """The batch of a step; all of it is decided."""
        assert self.is_decided
        return StepBatch(
            micro_batch_size=self.train.micro_batch_size * self.rows_each,
            seq_len=self.data.seq_len,
            num_micro_batches=self.train.grad_accumulation,
            rows_each=self.rows_each,
            num_runs=self.parallel.shards or 1,
            sequence=self.parallel.sequence,
            tile_tokens=None if self.train.tile_tokens == AUTO else self.train.tile_tokens,
        )

    @property
    def is_decided(self) -> bool:
        """Whether everything is decided from which the numbers follow; see `megatrain.config.decided`."""
        train = self.train
        sizes = (train.tokens_per_step, train.micro_batch_size, train.grad_accumulation)
        return AUTO not in (train.precision, self.data.seq_len, *sizes)

    @property
    def rows_each(self) -> int:
        """The number of sequences of a row: two of a pair, or of two judged answers."""
        return self.objective.rows.sequences

    @property
    def data_seed(self) -> int:
        """The seed of the order of the data."""
        return self.train.seed if self.data.seed is None else self.data.seed


_FIELDS = {field: key.split(".") for field, key in KEYS.items()}
"""The section and name of the settings that are fields of a choice."""


def conflicts(config: Config) -> list[str]:
    """List the settings that exclude each other, each with a way out."""
    train, optim, memory = config.train, config.optim, config.memory
    is_random = config.model.init == "random"
    problems = [*config.lora.problems(freezes=bool(train.freeze or train.only), is_random=is_random)]
    mirrors = memory.mirror_resident is not False
    problems += config.lora.problems_of_base(uses_drives=bool(memory.drives), mirrors=mirrors)
    problems += config.preference.problems(
        config.objective, is_random=is_random, packing=config.data.packing, too_long=config.data.too_long
    )
    problems += eval_conflicts(config.eval, has_data=config.data.val_size > 0 or bool(config.data.eval_path))
    if config.data.val_size > 1 and config.data.val_size % 1:
        problems.append(
            f"data.val_size is {config.data.val_size}; use a share below 1, or a whole number of examples"
        )
    if optim.state not in (states := [each.state for each in OPTIMIZERS[optim.name]]):
        problems.append(
            f"optim.state is {optim.state} and optim.name is {optim.name}, whose state is kept in "
            f"{' or '.join(states)}; use one of these"
        )
    if optim.updates == "immediate" and optim.max_grad_norm is not None:
        problems.append(
            f"optim.updates is immediate and optim.max_grad_norm is {optim.max_grad_norm}: a layer would be "
            "updated before the norm of all gradients is known; use optim.updates=deferred, or "
            "optim.max_grad_norm=null"
        )
    if config.train.steps is not None and config.train.epochs is not None:
        problems.append(
            "train.steps and train.epochs are both given; keep one, and set the other to null "
            "(train.epochs=null) where a file or a recipe has it"
        )
    if optim.updates == "immediate" and config.train.on_spike != "warn":
        problems.append(
            f"optim.updates is immediate and train.on_spike is {config.train.on_spike}: layers are updated "
            "before the loss of the step is looked at; use optim.updates=deferred, or train.on_spike=warn"
        )
    if optim.updates == "immediate" and memory.gradients in ("device", "nvme"):
        problems.append(
            f"memory.gradients is {memory.gradients} and optim.updates is immediate: gradients are used up "
            "at once, and wait for nothing; use memory.gradients=host, or optim.updates=deferred"
        )
    if memory.sums == "host" and memory.gradients in ("device", "nvme"):
        problems.append(
            f"memory.gradients is {memory.gradients} and memory.sums is host: what the host has added up is "
            "complete there, and waits nowhere else; use memory.gradients=host, or memory.sums=device"
        )
    shards = config.parallel.shards or 1
    if memory.sums in ("host", "nvme") and shards > 1:
        problems.append(
            f"memory.sums is {memory.sums} and parallel.shards is {shards}: the sums of runs are "
            "joined on the device; use memory.sums=device, or parallel.shards=1"
        )
    if train.grad_accumulation != AUTO:
        problems += cut_problems(shards, train.grad_accumulation)
    if memory.fragments is True and memory.num_slots == 1:
        problems.append(
            "memory.fragments is true and memory.num_slots is 1: the parts of a layer are on the device "
            "together in its backward; use memory.num_slots=2 or more, or memory.fragments=false"
        )
    if memory.fragments is True and memory.expert_chunks not in ("auto", 1):
        problems.append(
            f"memory.fragments is true and memory.expert_chunks is {memory.expert_chunks}: a layer comes "
            "apart in one way or the other; use memory.fragments=false, or memory.expert_chunks=1"
        )
    if memory.lockstep != "auto" and AUTO != train.grad_accumulation < memory.lockstep:
        problems.append(
            f"memory.lockstep is {memory.lockstep}, but a step has {train.grad_accumulation} "
            "micro-batches (train.grad_accumulation); use at most as many, or auto"
        )
    for name, instead in () if memory.drives else WITHOUT_DRIVES.items():
        if getattr(memory, name) == "nvme":
            problems.append(
                f"memory.{name} is nvme, but memory.tiers names no drives; add memory.tiers={{nvme: "
                f"[DIRECTORY]}}, with one directory per drive, or use memory.{name}={instead}"
            )
    if memory.tiers != "auto":
        given = {
            "device": (memory.tiers.device, memory.device_limit),
            "ram": (memory.tiers.ram, memory.host_limit),
        }
        for key, limit in (("device", "device_limit"), ("ram", "host_limit")):
            if None not in given[key] and given[key][0] != given[key][1]:
                problems.append(f"memory.tiers.{key} and memory.{limit} are both given and differ; keep one")
        if memory.commits and memory.resident_blocks not in ("auto", 0):
            problems.append(
                f"memory.resident_blocks is {memory.resident_blocks}, but state is on drives "
                "(memory.tiers.nvme), from where no layer goes to the device for good; use "
                "memory.resident_blocks=0, or memory.commit_every=null if RAM holds the state"
            )
    if memory.mirror_resident is False and memory.drives:
        problems.append(
            "memory.mirror_resident is false, but memory.tiers.nvme names drives, from where no layer goes "
            "to the device for good; use memory.mirror_resident=auto, or no drives"
        )
    return problems
