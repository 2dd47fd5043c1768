"""The published rows, each as what the planner prices: a model, a batch, a choice, kernels and a machine.

Nothing here lists an operation: a rival's schedule is a `Choice` (which layers are resident, which run again,
how many micro-batches pass a layer together), its kernels are `Kernels`, and an optimizer of its own is a
machine whose updates run at the rate of what it waits for: host memory, or the link that state is streamed
over.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from benchmarks.published.expert_parallel import (
    expert_params,
    own_share,
    sent_tokens,
    with_exchange,
    with_own_share,
    with_windows,
)
from megatrain.config.choice import Choice, StepBatch
from megatrain.hardware import HardwareSpec, MemoryNode, load_machine
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.model.profile.flops import experts_of
from megatrain.plan.cost.deterministic import deterministic_spec
from megatrain.plan.cost.rates import Kernels, Rates
from megatrain.plan.cost.step_time import Step

_ROWS = Path(__file__).parent / "rows.json"
_SCALING = Path(__file__).parent / "scaling.json"
_HELD_OUT = Path(__file__).parent / "held_out.json"
_EXPERTS = Path(__file__).parent / "experts.json"
_LONG = Path(__file__).parent / "long.json"
_HOST_SHARE = 0.8
"""Of the host memory's rate, what updates reach: as in the machine files."""
_FLASH2 = ("a100", "rtx-3090", "rtx-5090")
"""Devices whose attention is FlashAttention-2."""
_TIED = ("Qwen3-1.7B",)
"""Models whose head has the embedding's weight in the rows as they were run."""
_WINDOWED = "attention_flops"
"""The key of a model whose windows no kernel that is counted has: of the attention of whole rows, what they
leave. The classes of gpt-oss make a T x T matrix, which no system of the rows does."""
_ACTIVATION_BYTES = 2
"""Of bf16, which all systems of these rows send tokens in."""
_FUSED_UPDATE_BYTES = 30
"""Device memory that one fused kernel of AdamW touches per parameter, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """What is known of how a system trains."""

    source: str
    does: str
    is_fused: bool
    sum_bytes: int = 4
    recomputed: float = 0.0
    forwards: int = 0
    """3: every layer runs forward, again for the boundaries after it, and again in its backward."""
    stages_weights: bool = False
    """The launching thread copies weights into locked memory before each fetch."""
    update_bytes: float = 0.0
    """Host memory that everything after the last backward touches per parameter."""
    state_up: float = 0.0
    """Bytes per parameter that come to the device for its update, and that go back."""
    state_down: float = 0.0
    updates_at_once: bool = False
    """Each block is updated right after its last backward, so that nothing can be clipped."""
    reads_host: bool = False
    """Of several GPUs, each reads whole layers from host memory, and sums pass it: nothing is gathered."""
    collective_bytes_per_s: float | None = None
    """What all GPUs of a node without access to each other reach together in its collectives, through host
    memory; None: copies at the links' rate."""
    gathers_late: bool = False
    """A layer is gathered when it is needed, and computing waits for it."""
    is_deterministic: bool = False
    """FlashAttention-2's backward runs in its deterministic mode."""
    attention_share: float | None = None
    """The rate of its attention over that of FlashAttention-2; None: the machine's own."""
    attention: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By machine, the FLOP/s of its attention for heads of 128, forward and backward, where that is not the
    machine's own."""
    fuses_head: bool | None = None
    """Operations of head and loss are joined; None: as those of layers."""
    dispatches_once: bool = False
    """A token goes once to each GPU that has some of its experts, rather than once for each expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure, with its settings."""

    system: str
    machine: str
    model: str
    seq_len: int
    micro_batch_size: int
    num_micro_batches: int
    lockstep: int
    tokens_per_s: float
    layers: int = 0
    """In place of the model's own; 0: these."""
    recomputed: float | None = None
    """FLOPs of what runs again, over those of the model; None: as its system does."""
    is_resident: bool = False
    """Weights and state stay on the device."""
    state_up: float = 0.0
    state_down: float = 0.0
    is_fitted: bool = False
    gpus: int = 1
    """Of each node; micro-batches are of one GPU."""
    nodes: int = 1
    is_sharded: bool = False
    """Each GPU holds a part of the weights, and they are gathered for every micro-batch; otherwise each has
    all of them, and they are gathered once per step."""
    is_fused: bool | None = None
    """None: as its system."""
    experts: int = 1
    """The GPUs of a node that share out the experts of each layer; 1: each computes with all of them."""
    source: str = ""
    """Where it is in its system's source; empty: that says it."""
    left_out: str = ""
    """Why it is not predicted."""

    @property
    def tokens(self) -> int:
        """Of a step, on all GPUs."""
        return self.batch.step_tokens

    @property
    def batch(self) -> StepBatch:
        """Of a step."""
        return StepBatch(
            micro_batch_size=self.micro_batch_size,
            seq_len=self.seq_len,
            num_micro_batches=self.num_micro_batches,
            num_ranks=self.gpus * self.nodes,
            num_nodes=self.nodes,
            gathers=self.gpus > 1 and not system_of(self).reads_host,
        )


@cache
def _read(path: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(path.read_text()))


@cache
def _rows_of(path: Path) -> tuple[Row, ...]:
    return tuple(Row(**fields) for fields in _read(path)["rows"])


def rows() -> Iterator[Row]:
    """Yield all rows of one GPU, those left out too."""
    yield from _rows_of(_ROWS)


def long_rows() -> tuple[Row, ...]:
    """Return the rows of one GPU with more than 131,072 tokens each."""
    return _rows_of(_LONG)


def scaling_rows() -> tuple[Row, ...]:
    """Return the rows of several GPUs, those left out too."""
    return _rows_of(_SCALING)


def held_out_rows() -> tuple[Row, ...]:
    """Return the rows that nothing is fitted to and no model was made with, those left out too."""
    return _rows_of(_HELD_OUT)


def expert_rows() -> tuple[Row, ...]:
    """Return the rows of models with experts."""
    return _rows_of(_EXPERTS)


def held_out_groups() -> tuple[str, ...]:
    """Return the groups of rows of models with experts that no model was made with, by system and machine."""
    return tuple(_read(_EXPERTS)["held_out"])


def unscored_expert_rows() -> tuple[dict[str, str], ...]:
    """Return what was found of models with experts and is not predicted, each with its settings and why."""
    return tuple(_read(_EXPERTS)["listed"])


def _described(kind: str) -> dict[str, Any]:
    """Return what files of rows describe of a kind, `systems`, `models` or `machines`, by name."""
    found: dict[str, Any] = {}
    for path in (_SCALING, _HELD_OUT, _EXPERTS, _ROWS):
        found |= _read(path).get(kind, {})
    return found


def machine_named(name: str) -> HardwareSpec:
    """Return a bundled machine, or one of those that a file of rows describes as another with some fields."""
    described = _described("machines")
    if name not in described:
        return load_machine(name)
    changes = {key: value for key, value in described[name].items() if key not in ("of", "sources")}
    if "memory" in changes:
        changes["memory"] = tuple(MemoryNode(**node) for node in changes["memory"])
    base = load_machine(described[name]["of"])
    rates = {**base.matmul_flops_per_s, **changes.pop("matmul_flops_per_s", {})}
    return replace(base, name=name, matmul_flops_per_s=rates, **changes)


@cache
def system_of(row: Row) -> System:
    """Return what is known of a row's system."""
    return System(**_described("systems")[row.system])


def _sizes(model: str) -> list[int]:
    return cast(list[int], _described("models")[model])


@cache
def _config(model: str, layers: int) -> PretrainedConfig:
    described = _described("models")[model]
    if isinstance(described, dict):
        return AutoConfig.for_model(**{key: described[key] for key in described if key != _WINDOWED})
    hidden, intermediate, own_layers, heads, groups, vocab = described
    if model.startswith("MPT"):  # learned positions, no gates, a head that shares the embedding's weight
        return GPT2Config(
            n_embd=hidden,
            n_inner=intermediate,
            n_layer=own_layers,
            n_head=heads,
            vocab_size=vocab,
            n_positions=1 << 16,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    kinds = {"Qwen2": Qwen2Config, "Qwen3": functools.partial(Qwen3Config, head_dim=128)}
    kind = kinds.get(model[:5], LlamaConfig)
    return kind(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers or own_layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocab,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=model in _TIED,
    )


@cache
def _count(model: str, layers: int, micro_batch_size: int, seq_len: int) -> Anatomy:
    config = _config(model, layers)
    # none of these runs its head's forward again: a kernel like ours makes the gradient of the logits
    found = count_anatomy(config, micro_batch_size=micro_batch_size, seq_len=seq_len, precision="bf16")
    described = _described("models")[model]
    return with_windows(found, described[_WINDOWED]) if _WINDOWED in described else found


def config_of(row: Row) -> PretrainedConfig:
    """Return the configuration of a row's model."""
    return _config(row.model, row.layers)


def anatomy_of(row: Row) -> Anatomy:
    """Return what a row's model costs a GPU for one of its micro-batches."""
    whole = _whole_anatomy(row)
    if row.experts == 1:
        return whole
    sent = sent_tokens(*_experts_of(row), row.experts, is_once=system_of(row).dispatches_once)
    nbytes = whole.tokens * sent * config_of(row).hidden_size * _ACTIVATION_BYTES
    return with_exchange(with_own_share(whole, _own_share(row)), nbytes)


def _whole_anatomy(row: Row) -> Anatomy:
    return _count(row.model, row.layers, row.micro_batch_size, row.seq_len)


def _experts_of(row: Row) -> tuple[int, int]:
    found = experts_of(config_of(row))
    assert found is not None, f"{row.model} has no experts to share out"
    return found


def _own_share(row: Row) -> float:
    """Return which part of a layer a GPU has, where experts are shared out."""
    whole = _whole_anatomy(row)
    return own_share(whole, expert_params(whole, *_experts_of(row)), row.experts)


def choice_of(row: Row) -> Choice:
    """Return a row's schedule in the planner's terms."""
    system, anatomy = system_of(row), anatomy_of(row)
    num_layers = len(anatomy.layers)
    again = system.recomputed if row.recomputed is None else row.recomputed
    if system.forwards == 3:  # boundaries are made again by a forward of their own
        policies = ["recompute"] + ["drop_boundary"] * (num_layers - 1)
    else:
        layer = anatomy.layers[0].forward
        flops = num_layers * (layer.matmul_flops + layer.attention_flops) / anatomy.tokens
        count = min(num_layers, round(again * anatomy.model_flops_per_token / flops * num_layers))
        policies = ["recompute"] * count + ["keep"] * (num_layers - count)
    if row.gpus * row.nodes > 1 and not system.reads_host and not system.update_bytes:
        return _on_several(row, tuple(policies))
    late = row.gpus > 1 and system.gathers_late
    updates = "immediate" if system.updates_at_once else "serial"
    return Choice(
        activations=tuple(policies),
        lockstep=row.lockstep,
        resident_layers=num_layers if row.is_resident else 0,
        outer_resident=row.is_resident,
        updates="deferred" if row.is_resident else updates,
        num_slots=1 if row.is_resident or late else 2,
        num_gradient_buffers=2,
    ).with_defaults(num_layers)


def _on_several(row: Row, policies: tuple[str, ...]) -> Choice:
    """Return the schedule of a system whose weights and gradients stay on its GPUs.

    They are what a program streams, from memory that is as fast as the device's own: see `machine_of`.
    """
    return Choice(
        activations=policies,
        lockstep=1 if row.is_sharded else row.num_micro_batches,
        updates="serial",
        num_slots=2,
        num_gradient_buffers=2,
    ).with_defaults(len(policies))


def machine_of(row: Row, spec: HardwareSpec) -> HardwareSpec:
    """Return the machine with the updates of a row's system: at the rate of what they wait for."""
    system = system_of(row)
    spec = replace(spec, launches_per_s=None)  # none is bound by launches: large batches, or no Python
    if system.is_deterministic and row.machine in _FLASH2:
        spec = deterministic_spec(spec, row.micro_batch_size * _sizes(row.model)[3])
    if row.machine in system.attention:
        spec = _at_rates(spec, *system.attention[row.machine])
    if system.attention_share is not None:
        spec = _with_attention(spec, system.attention_share * spec.flash2_share)
    if system.stages_weights:
        nbytes = anatomy_of(row).layers[0].fragments
        staged_s = (
            sum(part.sizes.working_bytes for part in nbytes) / spec.h2d_bytes_per_s / spec.pageable_share
        )
        spec = replace(spec, launch_s=spec.launch_s + staged_s)
    if row.gpus * row.nodes > 1:
        spec = spec.with_ranks(row.gpus, row.nodes)
        if system.reads_host:
            spec = replace(spec, peer_bytes_per_s=None)
        elif spec.peer_bytes_per_s is None:  # copies through host memory use both ways of a link
            copies = spec.both_share * spec.h2d_bytes_per_s
            shared = (system.collective_bytes_per_s or 0.0) / row.gpus
            spec = replace(spec, peer_bytes_per_s=shared or copies)
    up, down = row.state_up or system.state_up, row.state_down or system.state_down
    if up:
        rate = spec.num_gpus * min(spec.h2d_bytes_per_s / up, spec.d2h_bytes_per_s / down)
    elif row.gpus * row.nodes > 1 and not system.update_bytes:
        rate = spec.num_gpus * spec.device_bytes_per_s / _FUSED_UPDATE_BYTES
        rate *= _own_share(row) if row.experts > 1 else 1.0  # each updates its part of all experts
    elif system.update_bytes:
        rate = _HOST_SHARE * spec.host_bytes_per_s / system.update_bytes
    else:
        return spec
    spec = replace(spec, update_params_per_s={1: rate}, compressed_params_per_s={})
    return _on_devices(spec) if row.gpus * row.nodes > 1 and not system.update_bytes else spec


def _at_rates(spec: HardwareSpec, forward: float, backward: float) -> HardwareSpec:
    """Return a machine whose attention in bf16, with heads of 128, runs at these rates."""
    behind = spec.attention_backward_flops_per_s or spec.attention_flops_per_s
    return replace(
        spec,
        attention_flops_per_s={**spec.attention_flops_per_s, "bf16": forward},
        attention_backward_flops_per_s={**behind, "bf16": backward},
    )


def _with_attention(spec: HardwareSpec, share: float) -> HardwareSpec:
    """Return a machine with a slower kernel for attention."""
    backward = spec.attention_backward_flops_per_s or spec.attention_flops_per_s
    return replace(
        spec,
        attention_flops_per_s={key: rate * share for key, rate in spec.attention_flops_per_s.items()},
        attention_backward_flops_per_s={key: rate * share for key, rate in backward.items()},
    )


def _on_devices(spec: HardwareSpec) -> HardwareSpec:
    """Return a machine whose weights and gradients stay on its devices, where copies and updates are."""
    memory = tuple(replace(node, bytes_per_s=1e15) for node in spec.memory)
    rate = spec.device_bytes_per_s / 2
    return replace(spec, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate, both_share=1.0, memory=memory)


def step_of(row: Row, spec: HardwareSpec, kernels: Kernels | None = None) -> Step:
    """Return the step that the planner prices for a row, with its system's kernels or others."""
    system, anatomy = system_of(row), anatomy_of(row)
    is_fused = system.is_fused if row.is_fused is None else row.is_fused
    streamed = (row.state_up or system.state_up) + (row.state_down or system.state_down)
    kernels = kernels or Kernels(
        fuses_layers=is_fused,
        fuses_head=is_fused if system.fuses_head is None else system.fuses_head,
        device_update_bytes=_FUSED_UPDATE_BYTES,
        host_update_bytes=streamed or system.update_bytes or None,
        sum_bytes=system.sum_bytes,
    )
    rates = Rates(machine_of(row, spec).of_rank(), "bf16", kernels=kernels, head_dim=anatomy.head_dim)
    return Step(rates, anatomy, choice_of(row), row.batch, clips=not system.updates_at_once)


def flops_of(row: Row) -> float:
    """Return the FLOPs of a row's step, with what runs again: what a prediction by FLOPs alone goes by."""
    system, anatomy = system_of(row), anatomy_of(row)
    layer = anatomy.layers[0].forward
    whole = layer.matmul_flops + layer.attention_flops
    again = sum(policy != "keep" for policy in choice_of(row).activations)
    again += len(anatomy.layers) if system.forwards == 3 else 0
    return (anatomy.model_flops_per_token * anatomy.tokens + again * whole) * row.num_micro_batches
