"""`megatrain.attach`: check that a model fits, move its state to the host, and put an engine under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.errors import ConfigError, ModelError
from megatrain.model.blocks import find_blocks, group_layers
from megatrain.store.state import read_precision
from megatrain.stream.activations import Activations
from megatrain.stream.bind import bind, plan_layouts, require_device_memory
from megatrain.stream.choose import Batch, Room, choose_activations, choose_lockstep, choose_residents
from megatrain.stream.compiled import is_compiled
from megatrain.stream.devices import make_lanes
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import Lanes
from megatrain.stream.policies import Policies

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def attach(
    model: PreTrainedModel,
    *,
    device: str | torch.device | Lanes = "cpu",
    precision: str = "fp32",
    num_slots: int | None = None,
    activations: str | Sequence[str] = "recompute",
    boundaries: Literal["device", "host"] = "device",
    fragments: bool = False,
    resident_blocks: int | Literal["auto"] = 0,
    lockstep: int | Literal["auto"] = 1,
    num_micro_batches: int = 1,
    micro_batch_size: int | None = None,
    tokens_per_micro_batch: int | None = None,
    num_gradient_buffers: int | None = None,
    head_chunk_tokens: int | None = None,
    compile: Literal["auto", "on", "off"] = "auto",
    host_limit: int | None = None,
    device_limit: int | None = None,
) -> Engine:
    """Make a model train by streaming, in place; `engine.detach()` undoes it.

    Every choice below changes where bytes are and when they move, and no bit of the result.

    Args:
        model: A Hugging Face causal LM on the CPU, or one from `megatrain.load`.
        device: Where to compute: `cpu`, `cuda`, `cuda:N`, `auto`, or `emulated` and `checked` for tests.
        precision: `fp32`, or `bf16`: bf16 weights that are the upper half of exact fp32 masters.
        num_slots: Device buffers for streamed blocks. None: 2, which overlap a copy with compute, or one
            more than a layer has fragments. 1 saves memory.
        activations: What stays of a layer between forward and backward: `keep`, `offload` (to the host),
            `recompute_cheap` (matrix products and attention stay), `recompute` (the layer's input stays),
            `drop_boundary` (not even that: the layers before make it again), or `auto`. One for all layers,
            or a sequence with one per layer.
        boundaries: Where the inputs of recomputed layers wait: on the `device`, or on the `host`.
        fragments: Stream each layer in parts (attention; mlp or experts), in slots as large as a part.
        resident_blocks: How many of the first layers stay on the device with their gradients and optimizer
            state, and are updated there; with all of them, the embedding and the head too. `auto`: as many
            as the device's memory holds.
        lockstep: Micro-batches of `forward_backward` that pass each layer together: a layer is fetched twice
            for all of them, and their boundaries are on the device at the same time. `auto`: all of a step,
            or as many as the device's memory holds. Without seeds, each draws its dropout from a seed of its
            own, since they take turns.
        num_micro_batches: How many `forward_backward` will be given, for `auto` and for the check of memory:
            where they take several rounds, bf16 sums them in fp32, 4 bytes per parameter more.
        micro_batch_size: Split a larger batch of `model(**batch)` into micro-batches of this many rows, which
            run in lockstep. None: never.
        tokens_per_micro_batch: What `auto` reckons with.
        num_gradient_buffers: Device buffers in which gradients of streamed blocks add up. None: as few as
            keep copies and compute apart.
        head_chunk_tokens: Tokens that pass the head and the loss at a time; None: chosen so that small
            batches take one chunk, which is bitwise equal to the model's own loss.
        compile: Run each layer (or fragment) through `torch.compile`, one compilation for all of a kind.
            `auto`: on accelerators. Compiled kernels round differently; what is exact is that streaming,
            recomputation and resuming give the bits of the same compiled layers. Off under `recompute_cheap`.
        host_limit: Bytes of host memory that the state may take; None: what the machine and its cgroups give.
        device_limit: Bytes of device memory for slots, resident blocks and gradients; None: what there is.

    Raises:
        ModelError: The model cannot be streamed exactly.
        CapacityError: The state does not fit into host or device memory; nothing was allocated.
        ConfigError: An argument out of range, or two that exclude each other.
    """
    for name, value in (
        ("num_slots", num_slots),
        ("num_gradient_buffers", num_gradient_buffers),
        ("head_chunk_tokens", head_chunk_tokens),
        ("lockstep", None if lockstep == "auto" else lockstep),
        ("num_micro_batches", num_micro_batches),
        ("micro_batch_size", micro_batch_size),
        ("tokens_per_micro_batch", tokens_per_micro_batch),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; use 1 or more")
    if compile not in ("auto", "on", "off"):
        raise ConfigError(f"compile is {compile!r}; use auto, on or off")
    if boundaries not in ("device", "host"):
        raise ConfigError(f"boundaries is {boundaries!r}; use device or host")
    if resident_blocks != "auto" and resident_blocks < 0:
        raise ConfigError(f"resident_blocks is {resident_blocks}; use 0 or more, or auto")
    kept = read_precision(precision)
    if getattr(model, "_megatrain_engine", None) is not None:
        raise ModelError("the model is attached to an engine already; call engine.detach() first")
    lanes = make_lanes(device, device_limit)
    blocks = find_blocks(model, fragments=fragments)
    layouts = plan_layouts(model, blocks, kept)
    layers = group_layers(blocks)
    most = max(map(len, layers))
    slots = num_slots or most + 1
    if slots < most:
        raise ConfigError(
            f"num_slots is {slots}, but a layer has {most} fragments, which are on the device together in "
            f"its backward; use num_slots={most} or more, or fragments=False"
        )
    room = Room(
        lanes=lanes,
        blocks=blocks,
        layouts=layouts,
        layers=layers,
        num_slots=slots,
        num_gradient_buffers=num_gradient_buffers or most + 1,
        config=model.config,
        batch=Batch(tokens_per_micro_batch or 0, num_micro_batches),
        boundaries_on_host=boundaries == "host",
    )
    together = choose_lockstep(room) if lockstep == "auto" else lockstep
    buffers = num_gradient_buffers or (most + 1 if together > 1 else 1)
    if together > 1 and buffers < most:
        raise ConfigError(
            f"num_gradient_buffers is {buffers}, but the gradients of a layer's {most} fragments add up at "
            f"the same time; use {most} or more, or fragments=False"
        )
    room = replace(room, num_gradient_buffers=buffers, batch=replace(room.batch, num_micro_batches=together))
    first = choose_activations(activations, room, frozenset()) if room.hides_copies else []
    residents = choose_residents(resident_blocks, room, first.count(Activations.KEEP))
    chosen = tuple(choose_activations(activations, room, residents))
    is_cheap = Activations.RECOMPUTE_CHEAP in chosen
    if is_cheap and compile == "on":
        raise ConfigError(
            "activations=recompute_cheap keeps the results of single operations, which a compiled layer does "
            "not show; use compile=off, or activations=keep: a compiled layer keeps little by itself"
        )
    policies = Policies(
        num_slots=slots,
        num_gradient_buffers=buffers,
        activations=chosen,
        boundaries_on_host=boundaries == "host",
        residents=residents,
        lockstep=together,
        micro_batch_size=micro_batch_size,
        head_chunk_tokens=head_chunk_tokens,
        compiles=not is_cheap and is_compiled(compile, lanes.device),
        host_limit=host_limit,
    )
    require_device_memory(blocks, layouts, lanes, policies)
    binding = bind(
        model, kept, accumulates=num_micro_batches > together, host_limit=host_limit, fragments=fragments
    )
    return Engine(model, binding, lanes, policies)
