"""Every setting a user has: read from YAML and overrides, checked, written out, and documented.

A `Config` is complete and checked when it exists: nothing downstream checks a type or a range again.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from megatrain.config_types import (
    Betas,
    Bytes,
    Count,
    Device,
    LocalPath,
    Name,
    Paths,
    Patterns,
    Rate,
    Schedule,
    Seed,
    reads_as,
)
from megatrain.errors import ConfigError
from megatrain.yaml12 import dump_yaml, parse_yaml


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(_Section):
    """What is trained."""

    path: LocalPath
    """Hugging Face causal LM: a directory with `config.json` and safetensors, or a hub id."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` reads the weights; `random` pre-trains from the directory's `config.json` alone."""
    attn_implementation: Name | None = None
    """Attention by its transformers name, such as `sdpa` or `eager`. null = transformers chooses."""
    kernels: Literal["auto", "liger", "torch"] = "auto"
    """Kernels of norms, rotary embeddings and activations: `liger` takes those of the `gpu` extra, `torch`
    the model's own. `auto` = `torch`, until the others have been measured."""


class DataConfig(_Section):
    """The text, and how it becomes batches."""

    path: Paths
    """Text files, one or a list: `.txt` (one document), `.jsonl`, `.json` or `.parquet` (one per row)."""
    text_column: Name = "text"
    """Column of `.jsonl`, `.json` and `.parquet` files that holds the text."""
    seq_len: Annotated[int, Field(ge=2)] = 512
    """Tokens per sequence. Documents are joined and cut to this length; not beyond the model's context."""
    tokenizer: LocalPath | None = None
    """Tokenizer directory or hub id. null = the model's own, or one trained on the data if `model.init` is
    `random` and the model has none."""
    vocab_size: Annotated[int, Field(ge=257)] | None = None
    """Entries of a tokenizer trained on the data. null = the model's vocabulary size."""
    shuffle: bool = True
    """Visit the sequences in a new random order in each pass over the data; false = in file order."""
    seed: Seed | None = None
    """Seed of the order of the data. null = `train.seed`."""


class TrainConfig(_Section):
    """The step, and how many of them."""

    steps: Count | None = None
    """Optimizer steps. null = one pass over the data."""
    micro_batch_size: Count = 1
    """Sequences in one forward and backward."""
    grad_accumulation: Count = 1
    """Micro-batches per optimizer step."""
    seed: Seed = 0
    """Seed of random initialisation, dropout and the order of the data."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`fp32`, or `bf16` compute with exact fp32 master weights; both take 12 bytes per parameter."""
    device: Device = "auto"
    """Where blocks run. `auto` = the GPU if there is one; `emulated` = a simulated GPU, for tests, with the
    rates of a JSON file if one is named."""
    reproducible: bool = False
    """Keep to the plan that was made at the start. false = plan anew between steps when the machine turns out
    faster or slower; every choice is exact, but the times of steps then depend on the machine's mood."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Run layers through `torch.compile`, one compilation for all of a kind. `auto` = on a GPU."""


class OptimConfig(_Section):
    """AdamW and its learning rate."""

    lr: Rate = 5e-5
    """Peak learning rate. About 1e-5 to 5e-5 suits fine-tuning, 3e-4 to 1e-3 pre-training a small model."""
    betas: Betas = (0.9, 0.95)
    """Decay of the running averages of the gradient and of its square."""
    eps: Rate = 1e-8
    """Added to the denominator of AdamW's update."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Decoupled weight decay."""
    no_decay: Patterns | None = None
    """Shell patterns of the parameter names without weight decay. null = biases and norms; [] = none."""
    max_grad_norm: Rate | None = 1.0
    """Clip the gradient's global norm to this. null = off."""
    updates: Literal["auto", "deferred", "immediate", "serial"] = "deferred"
    """When AdamW runs: behind the next step's forward (`deferred`), as soon as each gradient is complete
    (`immediate`; no clipping, and no skipping of a step that is not finite), or before the step ends
    (`serial`). The numbers are the same. `auto` = `deferred`, or `immediate` where it is faster and nothing
    is clipped."""
    state: Literal["fp32", "bf16", "int8"] = "fp32"
    """What AdamW's two moments are kept in. `fp32` is exact: 12 bytes per parameter in all. Not exact: `bf16`
    (stochastic rounding; 8 bytes) and `int8` (block-wise codes; 6.03 bytes)."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule by its transformers name."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    schedule_args: dict[str, Any] = {}
    """Further arguments of the schedule, such as `{min_lr_rate: 0.1}` for `cosine_with_min_lr`."""
    max_skipped_steps: Count = 10
    """Stop (exit code 5) after this many steps in a row with a non-finite gradient norm; each is skipped."""


_TIERS = "auto or a mapping of device and ram (sizes such as 20GiB) and nvme (directories on drives)"


class TiersConfig(_Section):
    """What the state may take of the device, of RAM and of drives."""

    device: Bytes | None = None
    ram: Bytes | None = None
    nvme: Paths | None = None


def _tiers(value: object) -> object:
    """Check the mapping as a whole, so that one problem is told once; nothing means `auto`."""
    if value is None or value == "auto":
        return "auto"
    if not isinstance(value, (Mapping, TiersConfig)):
        raise ValueError(_TIERS)
    try:
        return TiersConfig.model_validate(value)
    except ValidationError as error:
        raise ValueError(_TIERS) from error


class MemoryConfig(_Section):
    """Where memory goes, and how much. What is not given is planned; `memory: auto` plans everything."""

    num_slots: Count | None = None
    """Device buffers of one block each. null = as planned: 2 or more overlap copies with compute."""
    activations: Literal["auto", "keep", "offload", "recompute_cheap", "recompute", "drop_boundary"] = "auto"
    """What stays of a layer until its backward: all (`keep`), all on the host (`offload`), products and
    attention (`recompute_cheap`), its input (`recompute`), nothing (`drop_boundary`). `auto` = for each
    layer what is fastest."""
    boundaries: Literal["auto", "device", "host", "nvme"] = "auto"
    """Where the inputs of recomputed layers wait for the backward. `nvme` = on the drives of
    `memory.tiers`, where then also goes what `activations: offload` saves."""
    fragments: bool | Literal["auto"] = "auto"
    """Stream each layer in parts (attention; mlp or experts), through buffers as large as a part."""
    resident_blocks: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """First layers that stay on the device with all their state. `auto` = as planned; none on a CPU."""
    lockstep: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Micro-batches that pass each layer together, so that it is copied once for all. `auto` = as planned."""
    gradients: Literal["host", "device", "auto"] = "auto"
    """Where complete gradients wait for the norm. `device` = in spare device memory, which saves the host 2
    bytes per parameter; `auto` = as planned."""
    num_gradient_buffers: Count | None = None
    """Device buffers in which a streamed layer's gradient adds up. null = as planned."""
    head_chunk_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens per chunk of head and loss. 0 = chosen from the vocabulary size; small batches are one chunk."""
    host_limit: Bytes | None = None
    """Host memory the run may take. null = what the machine or container has."""
    device_limit: Bytes | None = None
    """Device memory the run may take. null = what the device has."""
    tiers: Annotated[TiersConfig | Literal["auto"], BeforeValidator(_tiers), reads_as(_TIERS)] = "auto"
    """`{device: 20GiB, ram: 64GiB, nvme: [/mnt/a, /mnt/b]}`: state that does not fit into `ram` goes to the
    drives of `nvme`, and no layer stays on the device; `device` and `ram` are the two limits above. `auto` =
    no drives."""
    commit_every: Count | None = 1
    """Steps between commits of state on drives: a crash goes back to the last one. Each writes the weights,
    2 bytes per parameter more, and all that lives in RAM. null = never, so back to the newest checkpoint."""

    @property
    def host_budget(self) -> int | None:
        """Bytes of RAM that the run may take, by either name."""
        return self.host_limit if self.tiers == "auto" or self.tiers.ram is None else self.tiers.ram

    @property
    def device_budget(self) -> int | None:
        """Bytes of the device that the run may take, by either name."""
        return self.device_limit if self.tiers == "auto" or self.tiers.device is None else self.tiers.device


class CheckpointConfig(_Section):
    """Checkpoints and resuming."""

    every: Count | None = 500
    """Steps between checkpoints. null = only at the end, or when stopped by a signal."""
    keep_last: Count | None = 2
    """Newest checkpoints to keep. null = all."""
    resume: Name = "auto"
    """`auto` continues from the newest whole checkpoint in `out`, `no` refuses to, a path names one."""


class HardwareConfig(_Section):
    """What is known of the machine, and wished for it; nothing here is changed by megatrain."""

    power_cap: Rate | None = None
    """Watts that the device should take at most. A run compares the device's limit with it and says which
    command sets it. null = no wish."""
    rated_bytes_written: Bytes | None = None
    """Endurance of the drives that the run writes to (TBW of their datasheet). A run that has written a
    tenth of it says so. null = not known."""


class LogConfig(_Section):
    """What is shown and recorded."""

    every: Count = 1
    """Steps between rows of `metrics.jsonl` and progress updates."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """A bar, plain lines, or neither. `auto` = a bar on a terminal, lines elsewhere."""


class Config(_Section):
    """One training run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    memory: MemoryConfig = MemoryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    hardware: HardwareConfig = HardwareConfig()
    log: LogConfig = LogConfig()
    out: LocalPath = "runs/train"
    """Run directory: `config.yaml env.json metrics.jsonl checkpoints/ hf/`."""

    @property
    def data_seed(self) -> int:
        """Seed of the order of the data."""
        return self.train.seed if self.data.seed is None else self.data.seed

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimizer step."""
        return self.train.micro_batch_size * self.train.grad_accumulation

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.sequences_per_step * self.data.seq_len


# Names that users of the Hugging Face Trainer and TRL know: read at top level only, with their meaning there.
ALIASES: Mapping[str, str] = {
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attn_implementation",
    "dataset_text_field": "data.text_column",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "max_steps": "train.steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.grad_accumulation",
    "seed": "train.seed",
    "data_seed": "data.seed",
    "learning_rate": "optim.lr",
    "adam_epsilon": "optim.eps",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "lr_scheduler_type": "optim.schedule",
    "lr_scheduler_kwargs": "optim.schedule_args",
    "warmup_steps": "optim.warmup_steps",
    "num_warmup_steps": "optim.warmup_steps",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "logging_steps": "log.every",
    "output_dir": "out",
}


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML configuration file as nested keys, aliases replaced; `build_config` checks them.

    Raises:
        ConfigError: not readable, not YAML, a key given twice, or not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    raw = parse_yaml(text, source=str(path))
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}: expected sections ({', '.join(Config.model_fields)}), found {_given(raw)}"
        )
    return _expand_aliases(raw, source=str(path))


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return `raw` with `a.b=value` overrides applied; values are YAML scalars, lists or mappings.

    Raises:
        ConfigError: an override without `=` or with an unreadable value, or two that set one key.
    """
    return set_keys(raw, [parse_override(override) for override in overrides])


def set_keys(raw: Mapping[str, Any], settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return `raw` with each dotted key of `settings` (or its alias) set to its value."""
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    spelled: dict[str, str] = {}
    for spelling, value in settings:
        key, value = _resolve_alias(spelling, value)
        if key in spelled:
            both = "" if spelling == spelled[key] else f" (as {spelled[key]} and as {spelling})"
            raise ConfigError(f"{key} is set twice on the command line{both}; keep one")
        spelled[key] = spelling
        *sections, leaf = key.split(".")
        target = result
        for section in sections:
            inner = target.get(section)
            # An unknown or misplaced section is kept, for `build_config` to name with every other problem.
            target[section] = inner = dict(inner) if isinstance(inner, Mapping) else {}
            target = inner
        target[leaf] = value
    return result


def build_config(raw: Mapping[str, Any], *, source: str = "configuration") -> Config:
    """Check nested keys and fill in the defaults.

    Args:
        raw: sections of keys, as `read_config` and `apply_overrides` return them.
        source: where they came from, named in every problem.

    Raises:
        ConfigError: every problem at once: unknown keys, wrong types, values out of range, missing keys.
    """
    try:
        # A section that is left empty in YAML reads as null, and means its defaults.
        config = Config.model_validate(
            {key: {} if _is_empty(key, value) else value for key, value in raw.items()}
        )
    except ValidationError as error:
        raise _as_error(source, [_describe(problem) for problem in error.errors()]) from None
    problems = _conflicts(config)
    if not problems:
        return config
    raise _as_error(source, problems)


def _is_empty(key: str, value: object) -> bool:
    """Whether a section says nothing; `memory: auto` says that all of it is planned."""
    return (value is None and key != "out") or (key == "memory" and value == "auto")


def _as_error(source: str, problems: Sequence[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(f"{source}: {problems[0]}")
    return ConfigError("\n  - ".join([f"{source} has {len(problems)} problems:", *problems]))


def _conflicts(config: Config) -> list[str]:
    """List the settings that exclude each other, each with a way out."""
    problems = []
    optim, memory = config.optim, config.memory
    if optim.updates == "immediate" and optim.max_grad_norm is not None:
        problems.append(
            f"optim.updates is immediate and optim.max_grad_norm is {optim.max_grad_norm}: a layer would be "
            "updated before the norm of all gradients is known; use optim.updates=deferred, or "
            "optim.max_grad_norm=null"
        )
    if optim.updates == "immediate" and memory.gradients == "device":
        problems.append(
            "memory.gradients is device and optim.updates is immediate: gradients are used up at once, and "
            "wait for nothing; use memory.gradients=host, or optim.updates=deferred"
        )
    if memory.fragments is True and memory.num_slots == 1:
        problems.append(
            "memory.fragments is true and memory.num_slots is 1: the parts of a layer are on the device "
            "together in its backward; use memory.num_slots=2 or more, or memory.fragments=false"
        )
    if memory.lockstep != "auto" and memory.lockstep > config.train.grad_accumulation:
        problems.append(
            f"memory.lockstep is {memory.lockstep}, but a step has {config.train.grad_accumulation} "
            "micro-batches (train.grad_accumulation); use at most as many, or auto"
        )
    if memory.boundaries == "nvme" and (memory.tiers == "auto" or not memory.tiers.nvme):
        problems.append(
            "memory.boundaries is nvme, but memory.tiers names no drives; add memory.tiers={nvme: "
            "[DIRECTORY]}, with one directory per drive, or use memory.boundaries=host"
        )
    if memory.tiers != "auto":
        given = {
            "device": (memory.tiers.device, memory.device_limit),
            "ram": (memory.tiers.ram, memory.host_limit),
        }
        for key, limit in (("device", "device_limit"), ("ram", "host_limit")):
            if None not in given[key] and given[key][0] != given[key][1]:
                problems.append(f"memory.tiers.{key} and memory.{limit} are both given and differ; keep one")
        if memory.tiers.nvme is not None and memory.resident_blocks not in ("auto", 0):
            problems.append(
                f"memory.resident_blocks is {memory.resident_blocks}, but state is on drives "
                "(memory.tiers.nvme), from where no layer goes to the device for good; use "
                "memory.resident_blocks=0"
            )
    return problems


def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Read, override and check a configuration file.

    Raises:
        ConfigError: see `read_config`, `apply_overrides` and `build_config`.
    """
    return build_config(apply_overrides(read_config(path), overrides), source=str(path))


def dump_config(config: Config) -> str:
    """Return `config` as YAML with every default written out; `load_config` reads the same value back."""
    return dump_yaml(config.model_dump(mode="json"))


def parse_override(override: str) -> tuple[str, Any]:
    """Split `a.b=value` into its key and its value, read as YAML.

    Raises:
        ConfigError: no `=`, no key, or a value that is not YAML.
    """
    key, equals, text = override.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"the override {override!r} is not of the form section.key=value")
    try:
        return key, parse_yaml(text, source=override)
    except ConfigError as error:
        raise ConfigError(
            f"the override {override!r} has no readable value; quote it: {key}='\"...\"'"
        ) from error


def _resolve_alias(spelling: str, value: Any) -> tuple[str, Any]:
    if spelling == "max_grad_norm" and value in (0, 0.0) and not isinstance(value, bool):
        value = None  # transformers' way to turn clipping off
    return ALIASES.get(spelling, spelling), value


def _expand_aliases(raw: Mapping[Any, Any], *, source: str) -> dict[str, Any]:
    """Move top-level aliases to their nested keys; a nested key that is given as well is a conflict."""
    nested = {key: value for key, value in raw.items() if key not in ALIASES}
    aliased = [(key, value) for key, value in raw.items() if key in ALIASES]
    given = {key for key, value in nested.items() if not isinstance(value, dict)}
    given |= {f"{key}.{inner}" for key, value in nested.items() if isinstance(value, dict) for inner in value}
    spelled: dict[str, str] = {}
    for spelling, _ in aliased:
        key = ALIASES[spelling]
        other = key if key in given else spelled.get(key)
        if other:
            raise ConfigError(f"{source}: {spelling} and {other} both set {key}; keep one")
        spelled[key] = spelling
    return set_keys(nested, aliased)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One setting, as help, documentation and errors show it."""

    name: str
    kind: str
    """What a value may be."""
    default: str
    """As YAML; "required" if there is none."""
    description: str


@cache
def config_keys() -> Mapping[str, Key]:
    """Every setting by its dotted name, in the order of the sections."""
    return {key.name: key for key in _keys(Config, "")}


def _keys(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    schemas = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
            continue
        yield Key(
            name=prefix + name,
            kind=_kind_of(schemas[name]),
            default="required" if field.is_required() else dump_yaml(field.default, flow=True),
            description=" ".join((field.description or "").split()),
        )


def _kind_of(schema: Mapping[str, Any]) -> str:
    if "kind" in schema:
        return str(schema["kind"])
    if "anyOf" in schema:
        return " or ".join(_kind_of(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(schema["enum"])
    kinds = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    kind = (kinds | {"object": "a mapping", "null": "null"})[schema["type"]]
    for bound, words in (("minimum", "{} or more"), ("exclusiveMinimum", "above {}")):
        if bound in schema:
            kind += f" ({words.format(schema[bound])})"
    return kind


def _given(value: object) -> str:
    kinds = {bool: "", int: "whole number", float: "number", str: "text", dict: "section", list: "list"}
    text = dump_yaml(value, flow=True) if isinstance(value, (bool, int, float)) else repr(value)
    kind = kinds.get(type(value), type(value).__name__)
    text = text if len(text) <= 60 else text[:57] + "..."
    return "null" if value is None else f"{text} ({kind})" if kind else text


def _describe(problem: Any) -> str:
    """Say in words what pydantic found."""
    name = str(problem["loc"][0]) + "".join(f".{part}" for part in problem["loc"][1:2])
    key = config_keys().get(name)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {name}; {_suggestion(name)}"
    if problem["type"] == "missing":
        required = [known for known in config_keys().values() if known.default == "required"]
        return "; ".join(
            f"{known.name} is required: {known.description}"
            for known in required
            if known.name == name or known.name.startswith(name + ".")
        )
    if key is None:
        inner = ", ".join(
            known.removeprefix(name + ".") for known in config_keys() if known.startswith(name + ".")
        )
        return f"{name} is {_given(problem['input'])}; it must be a section with keys from {inner}"
    kind = key.kind.replace(" | ", " or ")
    where = "".join(f"[{part}]" for part in problem["loc"][2:] if isinstance(part, int))
    hint = "; put it in quotes" if problem["type"] == "string_type" and problem["input"] is not None else ""
    return f"{name}{where} is {_given(problem['input'])}; it must be {kind}{hint}"


def _suggestion(name: str) -> str:
    keys = list(config_keys())
    section, _, leaf = name.rpartition(".")
    by_leaf = {key.rpartition(".")[2]: key for key in keys}
    targets = {**{key: key for key in keys}, **ALIASES}
    close = [leaf] if leaf in by_leaf else difflib.get_close_matches(name, targets, n=1, cutoff=0.75)
    close = close or difflib.get_close_matches(leaf, by_leaf, n=1)
    if close:
        return f"did you mean {targets.get(close[0]) or by_leaf[close[0]]}?"
    inside = [key.removeprefix(f"{section}.") for key in keys if section and key.startswith(f"{section}.")]
    return (
        f"{section} has {', '.join(inside)}"
        if inside
        else f"the sections are {', '.join(Config.model_fields)}"
    )
